#include "common-ridge-args.h"

#include "arg.h"
#include "common.h"
#include "ggml-ridge.h"
#include "llama-ridge.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>

// message of a value that is out of range; the parser puts the flag's name before it
static std::invalid_argument bad_value(const std::string & expected, const std::string & found) {
    return std::invalid_argument("expected " + expected + ", found '" + found + "'");
}

static int32_t parse_rows(const std::string & value, int32_t least = 1) {
    const char * begin = value.c_str();
    char * end = nullptr;
    errno = 0;
    const long long n = std::strtoll(begin, &end, 10);
    if (end == begin || *end != '\0' || errno != 0 || n < least || n > std::numeric_limits<int32_t>::max()) {
        throw bad_value("a whole number of rows, " + std::to_string(least) + " or more", value);
    }
    return (int32_t) n;
}

static std::string file_name(const std::string & value) {
    if (value.empty()) {
        throw bad_value("a file name", value);
    }
    return value;
}

static void set_mode(common_params & params, const std::string & value) {
    params.ridge.mode = llama_ridge_mode_from_name(value.c_str());
    if (params.ridge.mode < 0) {
        throw bad_value("off, plumb, identity, nofill, fill or transfer", value);
    }
}

static void set_rows(common_params & params, const std::string & value) {
    params.ridge.rows = ggml_ridge_selector_from_name(value.c_str());
    if (params.ridge.rows < 0) {
        throw bad_value("none, random or digits", value);
    }
}

static void set_hazard(common_params & params, const std::string & value) {
    if (value != "refill" && value != "allow") {
        throw bad_value("refill or allow", value);
    }
    params.ridge.allow_hazard = value == "allow";
}

static void set_budget(common_params & params, const std::string & value) {
    const char * begin = value.c_str();
    char * end = nullptr;
    const float budget = std::strtof(begin, &end);
    if (end == begin || *end != '\0' || !std::isfinite(budget) || budget < 0.0f) {
        throw bad_value("a share of the rows (0 < F < 1), a number of rows (F >= 1), or 0", value);
    }
    params.ridge.budget = budget;
}

static void set_seed(common_params & params, const std::string & value) {
    const char * begin = value.c_str();
    char * end = nullptr;
    errno = 0;
    const unsigned long long seed = std::strtoull(begin, &end, 10);
    if (end == begin || *end != '\0' || errno != 0 || *begin == '-') {
        throw bad_value("a whole number, 0 or more", value);
    }
    params.ridge.seed = seed;
}

void common_ridge_add_args(const std::function<void(common_arg)> & add_opt) {
    // which tools know a flag; llama-cli runs the server inside itself, llama-bench takes what is for LLAMA_EXAMPLE_BENCH
    using tools = std::initializer_list<llama_example>;
    const tools server  = { LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI };
    const tools prompts = { LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI, LLAMA_EXAMPLE_COMPLETION };
    const tools tails   = { LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI, LLAMA_EXAMPLE_COMPLETION, LLAMA_EXAMPLE_BENCH };
    const tools all     = { LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI, LLAMA_EXAMPLE_COMPLETION, LLAMA_EXAMPLE_BENCH, LLAMA_EXAMPLE_PERPLEXITY };

    const auto add = [&](common_arg arg, const char * env, tools where) {
        add_opt(arg.set_examples(where).set_env(env));
    };

    add(common_arg({"--ridge-maps"}, "FILE",
        "file of ridge maps: most rows of a long prompt skip the upper layers, whose keys and values the maps predict "
        "(default: none, every prompt runs exactly)",
        [](common_params & params, const std::string & value) { params.ridge.maps = file_name(value); }), "LLAMA_ARG_RIDGE_MAPS", all);
    add(common_arg({"--kv-mapper"}, "FILE",
        "mapper from the cache of --kv-source to that of --model: the smaller model runs long prompts, and this one answers over its "
        "cache, mapped (default: none)",
        [](common_params & params, const std::string & value) { params.ridge.mapper = file_name(value); }), "LLAMA_ARG_KV_MAPPER", server);
    add(common_arg({"--kv-source"}, "FILE",
        "model that runs long prompts in the place of --model, see --kv-mapper (default: none)",
        [](common_params & params, const std::string & value) { params.ridge.source = file_name(value); }), "LLAMA_ARG_KV_SOURCE", server);
    add(common_arg({"--ridge-mode"}, "{off,plumb,identity,nofill,fill,transfer}",
        "off: exact; plumb: both sweeps with every row exact; identity: predict by the split layer's state itself; "
        "nofill: rows are invisible to the upper layers; fill: predict by the maps; transfer: rows come from the cache of --kv-source "
        "(default: fill with --ridge-maps, transfer with --kv-mapper alone, else off; llama-bench takes several, separated by ',', and measures off,fill)", set_mode), "LLAMA_ARG_RIDGE_MODE", all);
    add(common_arg({"--ridge-tail"}, "N",
        "last rows of a prompt that always run exactly (default: what the file of maps recommends)",
        [](common_params & params, const std::string & value) { params.ridge.n_tail = parse_rows(value); }),
        "LLAMA_ARG_RIDGE_TAIL", tails);
    add(common_arg({"--ridge-rows"}, "{none,random,digits}",
        "further rows that run exactly: random ones, or every token that holds a digit and the one behind (default: none)",
        set_rows), "LLAMA_ARG_RIDGE_ROWS", all);
    add(common_arg({"--ridge-budget"}, "F",
        "most rows chosen by --ridge-rows: a share of the rows before the tail (0 < F < 1) or a number of rows (F >= 1); "
        "0: no limit for digits (default: 0)", set_budget), "LLAMA_ARG_RIDGE_BUDGET", all);
    add(common_arg({"--ridge-seed"}, "N",
        "seed of --ridge-rows random (default: 0)", set_seed), "LLAMA_ARG_RIDGE_SEED", all);
    add(common_arg({"--ridge-min-prompt"}, "N",
        "prompts with fewer new rows than this run exactly; 0: no minimum (default: twice the tail)",
        [](common_params & params, const std::string & value) { params.ridge.n_min_prompt = parse_rows(value, 0); }),
        "LLAMA_ARG_RIDGE_MIN_PROMPT", prompts);
    add(common_arg({"--ridge-step-rows"}, "N",
        "most rows of a filled prompt between two batches of the other slots (default: --ubatch-size)",
        [](common_params & params, const std::string & value) { params.ridge.n_step = parse_rows(value); }),
        "LLAMA_ARG_RIDGE_STEP_ROWS", server);
    add(common_arg({"--ridge-hazard"}, "{refill,allow}",
        "cached rows that an earlier prompt filled and that lie in this prompt's exact tail: run them again, or reuse them "
        "(default: refill)", set_hazard), "LLAMA_ARG_RIDGE_HAZARD", server);
}

bool common_ridge_owns(const common_arg & arg) {
    const auto begins = [&](const char * prefix) {
        return std::strncmp(arg.args[0], prefix, std::strlen(prefix)) == 0;
    };
    return !arg.args.empty() && (begins("--ridge-") || begins("--kv-mapper") || begins("--kv-source"));
}

// A glance at the head of a file, where writers put adapter.type. Only for better messages: the loaders check properly.
static bool looks_like_maps(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    std::string head(64*1024, '\0');
    file.read(&head[0], head.size());
    head.resize(file.gcount());

    // the key, its type (4 bytes), the length of the value (8 bytes), the value
    const size_t pos = head.find("adapter.type");
    return head.compare(0, 4, "GGUF") == 0 && pos != std::string::npos && pos + 12 + 4 + 8 <= head.size() &&
           head.compare(pos + 12 + 4 + 8, 10, "ridge_maps") == 0;
}

static void refuse_maps(const std::string & flag, const std::string & path, const std::string & expected) {
    if (!path.empty() && looks_like_maps(path)) {
        throw std::invalid_argument("error: " + flag + " " + path + ": expected " + expected +
                                    ", found a file of ridge maps; pass it as --ridge-maps");
    }
}

static void refuse_with_maps(const common_params & params) {
    const struct { bool given; const char * flag; const char * why; } flags[] = {
        { params.embedding,                  "--embeddings or --reranking", "expected a server of completions" },
        { !params.path_prompt_cache.empty(), "--prompt-cache",              "a file cannot record which rows are filled" },
        { params.grp_attn_n != 1,            "--grp-attn-n",                "it moves rows while the prompt is processed" },
        { params.hellaswag,                  "--hellaswag",                 "only perplexity is scored over filled rows" },
        { params.winogrande,                 "--winogrande",                "only perplexity is scored over filled rows" },
        { params.multiple_choice,            "--multiple-choice",           "only perplexity is scored over filled rows" },
        { params.kl_divergence,              "--kl-divergence",             "expected --ridge-maps with --save-all-logits, and --kl-divergence without" },
        { params.ppl_stride > 0,             "--ppl-stride",                "only perplexity over whole chunks is scored over filled rows" },
    };
    for (const auto & it : flags) {
        if (it.given) {
            throw std::invalid_argument(std::string("error: --ridge-maps and --kv-mapper cannot be used with ") + it.flag + ": " + it.why);
        }
    }
}

void common_ridge_validate(const common_params & params) {
    refuse_maps("--model",       params.model.path,                       "a model");
    refuse_maps("--model-draft", params.speculative.draft.mparams.path,   "a model");
    refuse_maps("--mmproj",      params.mmproj.path,                      "a multimodal projector");
    for (const auto & lora : params.lora_adapters) {
        refuse_maps("--lora", lora.path, "a LoRA adapter");
    }
    for (const auto & cvec : params.control_vectors) {
        refuse_maps("--control-vector", cvec.fname, "a control vector");
    }

    const auto & ridge = params.ridge;
    const bool random = ridge.rows == GGML_RIDGE_SELECT_RANDOM;

    if (ridge.mapper.empty() != ridge.source.empty()) {
        throw std::invalid_argument(std::string("error: --kv-mapper and --kv-source need each other, found only ") +
                (ridge.source.empty() ? "--kv-mapper" : "--kv-source"));
    }
    if (ridge.mode == LLAMA_RIDGE_MODE_TRANSFER && ridge.mapper.empty()) {
        throw std::invalid_argument("error: --ridge-mode transfer needs --kv-mapper FILE, found none");
    }
    if (ridge.maps.empty() && ridge.mode > LLAMA_RIDGE_MODE_OFF && ridge.mode < LLAMA_RIDGE_MODE_TRANSFER) {
        throw std::invalid_argument(std::string("error: --ridge-mode ") +
                llama_ridge_mode_name((llama_ridge_mode) ridge.mode) + " needs --ridge-maps FILE, found none");
    }
    if (!ridge.maps.empty() || !ridge.mapper.empty()) {
        refuse_with_maps(params);
    }
    if (random && ridge.budget == 0.0f) {
        throw std::invalid_argument("error: --ridge-rows random needs --ridge-budget: expected a share or a number of rows, found 0");
    }
    if (ridge.rows == GGML_RIDGE_SELECT_NONE && ridge.budget != 0.0f) {
        throw std::invalid_argument("error: --ridge-budget needs --ridge-rows: expected random or digits, found none");
    }
    const std::pair<const char *, bool> of_prompts[] = {
        { "--ridge-tail",       ridge.n_tail       != 0 },
        { "--ridge-min-prompt", ridge.n_min_prompt >= 0 },
        { "--ridge-step-rows",  ridge.n_step       != 0 },
        { "--ridge-hazard",     ridge.allow_hazard      },
    };
    for (const auto & flag : of_prompts) {
        if (flag.second && ridge.maps.empty() && ridge.mapper.empty()) {
            throw std::invalid_argument(std::string("error: ") + flag.first + " needs --ridge-maps FILE, found none");
        }
    }
    if (ridge.rows != GGML_RIDGE_SELECT_NONE && ridge.maps.empty()) {
        throw std::invalid_argument("error: --ridge-rows needs --ridge-maps FILE, found none");
    }
    if (ridge.seed != 0 && !random) {
        throw std::invalid_argument("error: --ridge-seed needs --ridge-rows random, found " + std::string(ggml_ridge_selector_name(ridge.rows)));
    }
}
