#pragma once

// What sidecars of every kind have in common: a GGUF whose every byte is accounted for, tensors listed with their sha256,
// calibration records, and the models they were made for. Every failure is a ridge_error.

#include "ridge-gguf.h"

#include "ggml-ridge.h"

#include "ggml-cpp.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

// a tensor that the file must hold
struct ridge_part {
    std::string          name;
    ggml_type            type;
    std::vector<int64_t> shape;
};

struct ridge_content {
    explicit ridge_content(const std::string & path) : file(path) {}

    ridge_file       file; // holds the data of the tensors
    ggml_context_ptr ctx;

    std::string hash;
    ggml_type   map_type = GGML_TYPE_COUNT;

    std::map<std::string, std::string>   strings; // all string keys
    std::map<std::string, std::string>   sha256;  // of each tensor
    std::map<std::string, ggml_tensor *> tensors;

    const ggml_tensor * tensor(const std::string & name) const {
        const auto it = tensors.find(name);
        return it == tensors.end() ? nullptr : it->second;
    }
};

// a model as a sidecar records it
struct ridge_model_record {
    std::string architecture;
    std::string tokenizer_sha256;
    std::string hparams;
    int32_t     block_count      = 0;
    int32_t     embedding_length = 0; // 0: not recorded
};

// names, and the sha256 of each
using ridge_hashes = std::vector<std::pair<std::string, std::string>>;

std::string ridge_sha256_hex(const void * data, size_t size);

void ridge_check_is_sha256(const std::string & key, const std::string & hex);

// an adapter with adapter.type = `adapter`, of a format version that is known
void ridge_check_kind_of_file(const ridge_gguf & gguf, const char * adapter);

// Sha256 of all bytes before the tensor data, taken with '0' for each digit of this value. It finds damage that leaves
// every key well-formed, such as another number of sink rows.
void ridge_check_metadata_hash(const ridge_content & content, const ridge_gguf & gguf, bool required);

int32_t ridge_read_i32(const ridge_gguf & gguf, const char * key, int64_t lo, int64_t hi);

// two arrays of equal length, `key` and `key`_sha256
ridge_hashes ridge_read_hashes(const ridge_gguf & gguf, const std::string & key);

// map type, hashes of the tensors, all string keys, and whether the calibration record is there
void ridge_read_common(ridge_content & content, const ridge_gguf & gguf);

void ridge_check_model(const ridge_model_record & found, const ggml_ridge_expect & expect);

// Exactly these tensors, each as it must be. Reads the rest of the file. `what` they are, for messages.
void ridge_read_tensors(ridge_content & content, const ridge_gguf & gguf, const std::vector<ridge_part> & parts, const std::string & what);

// What f() returns; nullptr and the reason where it throws.
template<typename F>
auto ridge_guarded(std::string & reason, F && f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        reason = "not enough memory";
    } catch (const std::exception & e) {
        reason = e.what();
    }
    return nullptr;
}

// text in one line, whatever it holds, as far as there is room
void ridge_report(char * err, size_t err_size, const std::string & text);
