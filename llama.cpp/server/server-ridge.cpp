#include "server-ridge.h"

#include "common-ridge-prompt.h"
#include "ggml-ridge.h"
#include "log.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>

// the slot's own macros need the slot
#define RDG_LOG(log, id_slot, id_task, fmt, ...) log("slot %12.*s: id %2d | task %d | ridge: " fmt, 12, __func__, id_slot, id_task, __VA_ARGS__)

void server_ridge::init(llama_context * ctx, const common_params & params, bool has_speculative, server_metrics & metrics, hooks hooks) {
    reset();

    this->ctx     = ctx;
    this->metrics = &metrics;
    this->server  = std::move(hooks);

    defaults   = params.ridge;
    kv_unified = params.kv_unified;
    here       = {};
    adapter_hashes.clear();
    no_maps_reason    = "";
    no_maps_message   = "";
    no_mapper_reason  = "";
    no_mapper_message = "";
    no_fill_reason    = has_speculative                ? "speculative"    :
                      !params.control_vectors.empty() ? "control_vector" : "";

    load_maps();
    load_source(params);
    if (loaded()) {
        describe_here(params);
    }

    const std::lock_guard<std::mutex> lock(mutex_props);
    props = describe();
}

// of what a file holds, since its path says nothing
static std::string content_of(const std::string & path) {
    try {
        return server_ridge_file_hash(path);
    } catch (const std::exception &) {
        return path; // it was read a moment ago
    }
}

void server_ridge::load_maps() {
    if (defaults.maps.empty()) {
        no_maps_reason = "no_maps";
        return;
    }
    if (const char * unsupported = llama_ridge_unsupported(ctx)) {
        no_maps_reason  = "unsupported";
        no_maps_message = unsupported;
        SRV_WRN("ridge: every prompt runs exactly: %s\n", unsupported);
        return;
    }
    maps = llama_ridge_maps_load(llama_get_model(ctx), defaults.maps.c_str());
    if (!maps) {
        no_maps_reason  = "refused";
        no_maps_message = llama_ridge_last_error(); // in the log already
        return;
    }
    const llama_ridge_params usual = request_params({}, LLAMA_RIDGE_MODE_FILL);
    SRV_INF("ridge: maps loaded: kind %s, split %d, tail %d, mode %s, sha256 %.12s\n", llama_ridge_maps_kind(maps),
            usual.split, usual.n_tail, llama_ridge_mode_name(mode_of({})), llama_ridge_maps_hash(maps));
}

void server_ridge::load_source(const common_params & params) {
    if (defaults.mapper.empty()) {
        no_mapper_reason = "no_mapper";
        return;
    }
    source = server_ridge_source::load(ctx, params, no_mapper_message);
    if (!source) {
        no_mapper_reason = "mapper_refused";
        SRV_WRN("ridge: no prompt is run by another model: %s\n", no_mapper_message.c_str());
        return;
    }
    const llama_ridge_params usual = request_params({}, LLAMA_RIDGE_MODE_TRANSFER);
    SRV_INF("ridge: mapper loaded: source '%s', first rows %d, tail %d, sha256 %.12s\n", defaults.source.c_str(),
            usual.n_sink, usual.n_tail, llama_ridge_mapper_hash(source->get_mapper()));
}

// what rows of this server depend on, beside maps and mapper
void server_ridge::describe_here(const common_params & params) {
    if (!no_fill_reason.empty()) {
        SRV_WRN("ridge: every prompt runs exactly (%s): the maps were fitted without it\n", no_fill_reason.c_str());
    }
    for (const auto & lora : params.lora_adapters) {
        adapter_hashes.push_back(content_of(lora.path));
    }
    const int32_t split = maps ? llama_ridge_maps_split(maps) : llama_model_n_layer(llama_get_model(ctx))/2;
    // in two calls: the length of the text, the text
    const auto text_of = [](const std::function<int32_t(char *, size_t)> & print) {
        std::string text(print(nullptr, 0) + 1, '\0');
        print(&text[0], text.size());
        text.pop_back();
        return text;
    };
    here.model = json::parse_no_throw(text_of([&](char * buf, size_t size) { return llama_ridge_model_fingerprint(llama_get_model(ctx), split, buf, size); }));
    here.cache = text_of([&](char * buf, size_t size) { return llama_ridge_cache_layout(ctx, buf, size); });
    for (const auto & vector : params.control_vectors) {
        here.cache += string_format(";control_vector=%s*%g", content_of(vector.fname).c_str(), vector.strength);
    }
}

void server_ridge::reset() {
    jobs.clear();
    working.clear();
    id_last = -1;

    llama_ridge_maps_free(maps);
    maps = nullptr;
    source.reset();
}

void server_ridge::add_to(json & res) const {
    const std::lock_guard<std::mutex> lock(mutex_props);
    if (!props.is_null()) {
        res["ridge"] = props;
    }
}

json server_ridge::describe_transfer() const {
    json res = json::object();
    res["mapper"] = defaults.mapper;
    res["source"] = defaults.source;
    res["loaded"] = source != nullptr;
    if (!source) {
        res["reason"]  = no_mapper_reason;
        res["message"] = no_mapper_message;
        return res;
    }
    const llama_ridge_params params = request_params({}, LLAMA_RIDGE_MODE_TRANSFER);
    res["reason"]     = no_fill_reason.empty() ? json(nullptr) : json(no_fill_reason);
    res["hash"]       = llama_ridge_mapper_hash(source->get_mapper());
    res["size"]       = llama_ridge_mapper_size(source->get_mapper());
    res["sink"]       = params.n_sink;
    res["tail"]       = params.n_tail;
    res["min_prompt"] = common_ridge_min_prompt(defaults, params.n_tail);
    return res;
}

json server_ridge::describe() const {
    if (!asked()) {
        return nullptr;
    }
    json res = json::object();
    if (!defaults.mapper.empty()) {
        res["transfer"] = describe_transfer();
    }
    if (defaults.maps.empty()) {
        res["mode"] = llama_ridge_mode_name(mode_of({}));
        return res;
    }
    res["maps"]       = defaults.maps;
    res["loaded"]     = maps != nullptr;
    res["mode"]       = llama_ridge_mode_name(mode_of({}));
    res["rows"]       = ggml_ridge_selector_name(defaults.rows);
    res["budget"]     = defaults.budget;
    res["seed"]       = defaults.seed;
    if (!maps) {
        res["reason"]  = no_maps_reason;
        res["message"] = no_maps_message;
        return res;
    }
    const llama_ridge_params params = request_params({}, LLAMA_RIDGE_MODE_FILL);
    res["reason"]     = no_fill_reason.empty() ? json(nullptr) : json(no_fill_reason);
    res["hash"]       = llama_ridge_maps_hash(maps);
    res["kind"]       = llama_ridge_maps_kind(maps);
    res["size"]       = llama_ridge_maps_size(maps);
    res["hazard"]     = defaults.allow_hazard ? "allow" : "refill";
    res["step_rows"]  = params.n_step > 0 ? json(params.n_step) : json(nullptr);
    res["split"]      = params.split;
    res["sink"]       = params.n_sink;
    res["tail"]       = params.n_tail;
    res["min_prompt"] = common_ridge_min_prompt(defaults, params.n_tail);
    return res;
}

//
// deciding
//

llama_ridge_mode server_ridge::mode_of(const server_ridge_request & request) const {
    return request.mode >= 0 ? (llama_ridge_mode) request.mode : common_ridge_mode(defaults);
}

// where can(mode): split and sink rows are those of the maps or the mapper
llama_ridge_params server_ridge::request_params(const server_ridge_request & request, llama_ridge_mode mode) const {
    const bool transfer = mode == LLAMA_RIDGE_MODE_TRANSFER;

    llama_ridge_params res = llama_ridge_default_params();
    res.mode   = mode;
    res.split  = transfer ? -1 : llama_ridge_maps_split(maps);
    res.n_sink = transfer ? llama_ridge_mapper_n_sink(source->get_mapper()) : llama_ridge_maps_n_sink(maps);
    res.n_step = defaults.n_step;
    res.n_tail = request.n_tail  > 0 ? request.n_tail  :
                 defaults.n_tail > 0 ? defaults.n_tail :
                 transfer ? llama_ridge_mapper_n_tail(source->get_mapper()) : llama_ridge_maps_n_tail(maps);
    return res;
}

// first rows of a sequence that no way of filling touches
int32_t server_ridge::n_sink() const {
    return std::max(maps ? llama_ridge_maps_n_sink(maps) : 0, source ? llama_ridge_mapper_n_sink(source->get_mapper()) : 0);
}

// what two fills must have in common for their cells to be of one kind: content, never a file name
std::string server_ridge::provenance(llama_ridge_mode mode) const {
    if (mode == LLAMA_RIDGE_MODE_TRANSFER) {
        return string_format("%s/%s", llama_ridge_mapper_hash(source->get_mapper()), llama_ridge_mode_name(mode));
    }
    return string_format("%s/%s/%s/%d", llama_ridge_maps_hash(maps), llama_ridge_maps_kind(maps),
            llama_ridge_mode_name(mode), llama_ridge_maps_split(maps));
}

// empty if the prompt may be filled
std::string server_ridge::reason_for_exact(const server_task & task, const std::vector<common_adapter_lora_info> & lora, llama_ridge_mode mode) const {
    if (mode == LLAMA_RIDGE_MODE_OFF) {
        return "off";
    }
    const std::string & nothing_loaded = mode == LLAMA_RIDGE_MODE_TRANSFER ? no_mapper_reason : no_maps_reason;
    if (!nothing_loaded.empty()) {
        return nothing_loaded;
    }
    if (!task.need_sampling()) {
        return "embedding";
    }
    if (!no_fill_reason.empty()) {
        return no_fill_reason;
    }
    if (!lora_get_enabled_ids(lora).empty()) {
        return "lora";
    }
    for (int32_t i = 0; i < task.n_tokens(); i++) {
        if (task.tokens[i] == LLAMA_TOKEN_NULL) {
            return "multimodal";
        }
    }
    return "";
}

// which of the server's adapters a prompt runs with, and how strongly
std::string server_ridge::adapters_key(const std::vector<common_adapter_lora_info> & lora) const {
    std::string res;
    for (const size_t i : lora_get_enabled_ids(lora)) {
        res += string_format("%s*%g;", adapter_hashes[i].c_str(), lora[i].scale);
    }
    return res;
}

server_ridge_want server_ridge::wanted(const server_task & task, const std::vector<common_adapter_lora_info> & lora) const {
    const llama_ridge_mode mode = mode_of(task.params.ridge);
    const bool pure_only = mode == LLAMA_RIDGE_MODE_PLUMB || !reason_for_exact(task, lora, mode).empty();

    return { loaded() ? adapters_key(lora) : "", pure_only ? "" : provenance(mode) };
}

int32_t server_ridge::plan(int32_t id_slot, const server_task & task, const std::vector<common_adapter_lora_info> & lora,
                           server_prompt & prompt, server_slot_stats & stats, int32_t n_past) {
    const server_ridge_request & request = task.params.ridge;

    const llama_ridge_mode  mode = mode_of(request);
    const server_ridge_want want = wanted(task, lora);

    const int32_t n_tokens = task.n_tokens();

    working.insert(id_slot);

    server_ridge_stats & res = stats.ridge;
    res.report = request.given || asked();
    metrics->ridge.n_seen += res.report;
    res.mode   = llama_ridge_mode_name(mode);
    res.reason = reason_for_exact(task, lora, mode);

    llama_ridge_params params = {};
    if (can(mode)) {
        params = request_params(request, mode);
        res.split  = params.split;
        res.n_tail = params.n_tail;
    }

    const int32_t n_common = n_past;
    n_past = prompt.ridge.usable(want, n_past);
    if (!want.made_by.empty()) {
        const int32_t i_tail = std::max(0, n_tokens - params.n_tail);
        res.n_hazard = prompt.ridge.count(n_past) - prompt.ridge.count(std::min(n_past, i_tail));
        if (!defaults.allow_hazard) {
            n_past = std::min(n_past, prompt.ridge.first_filled(i_tail)); // from there on they run again, exactly
        }
    }
    // a handful of sink rows is not worth it: without them the prompt is cut where a cold run cuts it
    if (n_past < n_common && n_past <= n_sink()) {
        n_past = 0;
    }

    if (res.reason.empty()) {
        const int64_t n_min = request.n_min_prompt >= 0 ? request.n_min_prompt : common_ridge_min_prompt(defaults, params.n_tail);
        const int32_t n_new = n_tokens - n_past;
        if (n_new < n_min || n_new <= params.n_tail) {
            res.reason = "short";
        }
    }
    prompt.ridge.keep_first(n_past);
    prompt.ridge.set_adapters(want.adapters);

    res.n_cached        = n_past;
    res.n_cached_filled = prompt.ridge.count(n_past);
    res.n_exact         = n_tokens - n_past;

    if (res.reason.empty()) {
        job & j = jobs[id_slot];
        j.task   = &task;
        j.prompt = &prompt;
        j.stats  = &stats;
        j.lora   = lora;
        j.params = params;
        j.n_past = n_past;
    } else {
        report(id_slot, task, res);
    }
    return n_past;
}

//
// running
//

int32_t server_ridge::begin(int32_t id_slot, job & j) {
    std::vector<llama_token> tokens;
    for (int32_t i = 0; i < j.task->n_tokens(); i++) {
        tokens.push_back(j.task->tokens[i]);
    }
    // another slot's adapter may be set
    common_set_adapter_lora(ctx, j.lora);

    if (j.params.mode == LLAMA_RIDGE_MODE_TRANSFER) {
        return source->begin(ctx, id_slot, tokens, j.n_past, j.params.n_tail, j.params.n_step, j.work);
    }
    tokens.erase(tokens.begin(), tokens.begin() + j.n_past);

    const std::vector<int32_t> rows = common_ridge_select_rows(defaults, ctx, tokens,
            std::max(0, j.params.n_sink - j.n_past), (int32_t) tokens.size() - j.params.n_tail);

    int32_t status;
    do {
        status = server_ridge_begin_prefill(ctx, maps, j.params, id_slot, j.n_past, tokens, rows, j.work);
    } while (status == LLAMA_RIDGE_ERR_NO_SPACE && server.free_space());
    return status;
}

bool server_ridge::start(int32_t id_slot) {
    const auto it = jobs.find(id_slot);
    if (it == jobs.end()) {
        return false;
    }
    job & j = it->second;

    const int32_t status = begin(id_slot, j);
    if (status == LLAMA_RIDGE_ERR_NO_SPACE) {
        end_slot(id_slot, j, llama_ridge_last_error());
        return true;
    }
    if (status < 0) {
        run_exactly(id_slot, j, status);
        return false;
    }
    if (j.params.mode != LLAMA_RIDGE_MODE_PLUMB && j.work->stats().n_filled == 0) {
        skip(id_slot, j, "short"); // no row before the tail but sinks and chosen ones
        return false;
    }
    return true;
}

bool server_ridge::is_active(int32_t id_slot) const {
    const auto it = jobs.find(id_slot);
    return it != jobs.end() && it->second.work;
}

int32_t server_ridge::n_progress(int32_t id_slot) const {
    if (!is_active(id_slot)) {
        return 0;
    }
    // the rows pass twice: count steps, not rows
    const auto stats = jobs.at(id_slot).work->stats();
    return stats.n_steps > 0 ? (int64_t) stats.n_done*stats.i_step/stats.n_steps : 0;
}

void server_ridge::step(server_queue & queue, const std::function<void(int32_t id_slot)> & on_progress) {
    if (jobs.empty()) {
        return;
    }
    auto it = jobs.upper_bound(id_last);
    if (it == jobs.end()) {
        it = jobs.begin();
    }
    const int32_t id_slot = it->first;
    job & j = it->second;
    id_last = id_slot;
    if (!j.work) {
        return; // planned only
    }

    // metrics tasks are answered meanwhile; they read the slot, so that nothing of it may change in there
    int32_t status = LLAMA_RIDGE_ERR_COMPUTE;
    try {
        queue.yield_to_queue([&]() {
            status = j.work->step();
        });
    } catch (const std::exception & e) {
        // from a task that was answered meanwhile; the step itself does not throw
        SRV_ERR("got exception: %s\n", e.what());
    }

    j.stats->update_prompt_last();

    if (status == LLAMA_RIDGE_ERR_NO_SPACE && server.free_space()) {
        j.work.reset(); // its rows are gone: once more from the start
        status = begin(id_slot, j);
    }
    if (status == LLAMA_RIDGE_ERR_NO_SPACE) {
        end_slot(id_slot, j, j.work ? j.work->error() : llama_ridge_last_error());
        return;
    }
    if (status == LLAMA_RIDGE_DONE && !has_room_at_end(id_slot, j)) {
        llama_memory_seq_rm(llama_get_memory(ctx), id_slot, j.n_past, -1);
        end_slot(id_slot, j, "the other slots took the cells of its last rows");
        return;
    }
    const bool progress = j.task->params.stream && j.task->params.return_progress;
    if (status == LLAMA_RIDGE_DONE) {
        finish(id_slot, j);
    } else if (status < 0) {
        run_exactly(id_slot, j, status);
    }
    if (progress) {
        on_progress(id_slot);
    }
}

// The last rows come in one batch with the next row of every other slot. One that does not fit would end them all.
bool server_ridge::has_room_at_end(int32_t id_slot, const job & j) const {
    const int32_t n_others = kv_unified ? working.size() - jobs.size() : 0; // those that do not fill
    const int32_t n_need   = j.task->n_tokens() - j.n_past - j.work->stats().n_done + n_others;

    bool has_room;
    do {
        has_room = llama_ridge_n_free(ctx, id_slot, false) >= n_need;
    } while (!has_room && server.free_space());
    return has_room;
}

// the rows are in the cache: enter them in the slot's prompt. Frees j.
void server_ridge::finish(int32_t id_slot, job & j) {
    const auto    stats  = j.work->stats();
    const int32_t n_done = stats.n_done;

    for (int32_t i = 0; i < n_done; i++) {
        j.prompt->tokens.push_back(j.task->tokens[j.n_past + i]);
    }
    j.prompt->ridge.add(provenance(j.params.mode), j.params.mode != LLAMA_RIDGE_MODE_NOFILL, j.n_past, j.work->filled());

    j.stats->n_prompt_processed += n_done;
    metrics->add_prompt(n_done, stats.t_lower_us + stats.t_upper_us);

    server_ridge_stats & res = j.stats->ridge;
    res.n_filled   = stats.n_filled;
    res.n_exact    = j.task->n_tokens() - j.n_past - stats.n_filled;
    res.t_lower_us = stats.t_lower_us;
    res.t_upper_us = stats.t_upper_us;
    report(id_slot, *j.task, res);

    jobs.erase(id_slot);
}

// the prefill could not begin, or failed and took its rows out of the cache: the ordinary path goes on from n_past. Frees j.
void server_ridge::run_exactly(int32_t id_slot, job & j, int32_t status) {
    RDG_LOG(LOG_WRN, id_slot, j.task->id, "the prompt runs exactly: %s\n", j.work ? j.work->error().c_str() : llama_ridge_last_error());
    const char * reason = status == LLAMA_RIDGE_ERR_NO_MEMORY   ? "no_memory"   :
                          status == LLAMA_RIDGE_ERR_UNSUPPORTED ? "unsupported" : "error";
    skip(id_slot, j, reason);
}

// The cache has no room for the prompt, and exactly it needs no less. The ordinary path would end every slot that is working:
// only this one is. Frees j.
void server_ridge::end_slot(int32_t id_slot, job & j, const std::string & why) {
    const std::string message = "the prompt does not fit into the KV cache beside the other slots: " + why;
    skip(id_slot, j, "no_space");
    server.end_slot(id_slot, message);
}

void server_ridge::skip(int32_t id_slot, job & j, const char * reason) {
    j.stats->ridge.reason = reason;
    report(id_slot, *j.task, j.stats->ridge);

    jobs.erase(id_slot);
}

void server_ridge::stop(int32_t id_slot) {
    working.erase(id_slot);

    const auto it = jobs.find(id_slot);
    if (it == jobs.end()) {
        return;
    }
    const job & j = it->second;
    if (j.work) {
        const auto stats = j.work->stats();
        RDG_LOG(LOG_INF, id_slot, j.task->id, "cancelled after step %d of %d (sweep 1: %d)\n",
                stats.i_step, stats.n_steps, stats.n_steps_lower);
    }
    jobs.erase(it); // takes the rows out of the cache
    metrics->ridge.count_cancelled();
}

bool server_ridge::give_way() {
    job * last = nullptr;
    int32_t id_slot = -1;
    for (auto & it : jobs) {
        if (it.second.work && (!last || it.second.task->id > last->task->id)) {
            last    = &it.second;
            id_slot = it.first;
        }
    }
    if (last) {
        end_slot(id_slot, *last, "the other slots took the last cells");
    }
    return last != nullptr;
}

void server_ridge::report(int32_t id_slot, const server_task & task, const server_ridge_stats & stats) {
    if (stats.report) {
        metrics->ridge.count(stats);
        RDG_LOG(LOG_INF, id_slot, task.id, "%s\n", stats.to_string().c_str());
    }
}

//
// slot files
//

void server_ridge::check_save(const server_prompt & prompt) const {
    if (!prompt.ridge.can_copy_out()) {
        throw std::runtime_error("the slot holds rows of mode nofill, or filled ones that a context shift moved: expected others, a file cannot tell them apart");
    }
}

bool server_ridge::add_record(const std::string & path, const server_prompt & prompt) const {
    if (!loaded()) {
        return true;
    }
    try {
        server_ridge_slot_file file = here;
        file.n_tokens = prompt.n_tokens();
        file.cells    = prompt.ridge;
        file.append_to(path);
        return true;
    } catch (const std::exception & e) {
        SRV_ERR("ridge: slot file '%s' was not saved: %s\n", path.c_str(), e.what());
        std::remove(path.c_str());
        return false;
    }
}

server_ridge::slot_rows server_ridge::check_restore(const std::string & path, int32_t id_slot, int32_t n_ctx) const {
    if (!loaded() && !std::ifstream(path)) {
        return {}; // upstream has words for that
    }
    try {
        const auto file = server_ridge_slot_file::read(path);
        if (!loaded()) {
            const bool filled = file && file->cells.has_filled();
            return { filled ? "its rows were filled: expected a server with the maps " + file->cells.made_by() + ", found one without" : "", {} };
        }
        if (!file) {
            throw std::runtime_error("expected a record of its rows at its end, found none: the file was cut, or saved by a server without maps");
        }
        file->check_made_as(here);

        const std::string & made_by = file->cells.made_by();
        std::vector<std::string> known;
        for (const auto mode : { LLAMA_RIDGE_MODE_FILL, LLAMA_RIDGE_MODE_IDENTITY, LLAMA_RIDGE_MODE_TRANSFER }) {
            if (can(mode)) {
                known.push_back(provenance(mode));
            }
        }
        if (file->cells.has_filled() && std::find(known.begin(), known.end(), made_by) == known.end()) {
            throw std::runtime_error("its rows were filled with other maps: expected " + known[0] + ", found " + made_by);
        }
        const int32_t n_max = std::min(n_ctx, llama_ridge_n_free(ctx, id_slot, true));
        if (file->n_tokens > n_max) {
            throw std::runtime_error(string_format("expected at most %d rows, for which the slot and the cache have room, found %d", n_max, file->n_tokens));
        }
        return { "", file->cells };
    } catch (const std::exception & e) {
        return { e.what(), {} };
    }
}
