#pragma once

// A bounds-checked reader of the GGUF container: version 3, little-endian, one file.
//
// ggml's own reader is not used: it allocates what the file says before it looks whether the file has it, and aborts when
// that fails; it logs several lines, raw bytes among them, where a user should see one; and it accepts what docs/SIDECAR.md
// refuses (other alignments, bytes after the last tensor, padding that is not zero).
// Every failure is a ridge_error, whose text fits on one line whatever bytes the file holds.

#include "gguf.h"

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

struct ridge_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

#ifdef __GNUC__
__attribute__((format(printf, 1, 2)))
#endif
std::string ridge_format(const char * fmt, ...);

// text of a file in quotes: at most 64 bytes of it, anything but printable ASCII as \xNN
std::string ridge_quote(const std::string & text);

// The bytes of a file, read front to back and only as far as asked. The header comes first, so that a 40 GB model passed
// by mistake is named as one without being read.
class ridge_file {
public:
    explicit ridge_file(const std::string & path);

    uint64_t size() const { return file_size; }

    // make bytes [0, end) available; end <= size()
    void read_to(uint64_t end);

    // valid until the next read_to()
    const uint8_t * data() const { return bytes.get(); }

private:
    // what backends ask of a host buffer that they use in place
    static constexpr std::align_val_t alignment{64};

    struct aligned_delete {
        void operator()(uint8_t * p) const { ::operator delete[](p, alignment); }
    };

    std::ifstream stream;
    uint64_t      file_size = 0;
    uint64_t      n_read    = 0;
    uint64_t      capacity  = 0;

    std::unique_ptr<uint8_t[], aligned_delete> bytes;
};

struct ridge_kv {
    gguf_type type;     // of the elements, if it is an array
    bool      is_array;
    uint64_t  n;        // elements
    uint64_t  offset;   // of the first element in the file
};

struct ridge_tensor_info {
    std::string           name;
    int32_t               type;   // ggml_type, as the file has it
    std::vector<uint64_t> shape;  // ggml order
    uint64_t              offset; // from the start of the data section
};

class ridge_gguf {
public:
    explicit ridge_gguf(ridge_file & file) : file(file) {}

    void read_metadata(); // magic, version, counts and keys
    void read_tensors();  // names, types, shapes and offsets; call after read_metadata()

    // Values by key. A key that is missing or has another type than asked for is an error; so is text that is not UTF-8
    // or holds a NUL, since it goes into JSON and C strings.
    bool                     has    (const std::string & key) const { return kv.count(key) != 0; }
    std::string              get_str(const std::string & key) const;
    uint32_t                 get_u32(const std::string & key) const;
    uint64_t                 get_u64(const std::string & key) const;
    float                    get_f32(const std::string & key) const;
    bool                     get_bool(const std::string & key) const;
    std::vector<float>       get_f32s(const std::string & key) const;
    std::vector<uint32_t>    get_u32s(const std::string & key) const;
    std::vector<std::string> get_strs(const std::string & key) const;

    // file offset of the first of the n bytes of a string value
    uint64_t str_offset(const std::string & key) const;

    std::map<std::string, ridge_kv>  kv;
    std::vector<ridge_tensor_info>   tensors;
    uint64_t                         header_end = 0; // byte after the last tensor info

private:
    const ridge_kv & find(const std::string & key, gguf_type type, bool is_array) const;
    std::vector<std::string> strings_of(const std::string & key, const ridge_kv & item) const;

    const uint8_t * take(uint64_t n);
    uint32_t        take_u32();
    uint64_t        take_u64();
    uint64_t        take_count(uint64_t min_size, const char * of_what);
    std::string     take_str();
    void            check_magic();
    void            read_kv();

    ridge_file & file;
    uint64_t     pos       = 0;
    uint64_t     n_kv      = 0;
    uint64_t     n_tensors = 0;
    std::string  where     = "the header"; // what is being read, for messages
};
