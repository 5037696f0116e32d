// Where the tensors of sidecars lie.

#include "llama-ridge-impl.h"

#include "llama-impl.h"
#include "llama-model.h"

// can the device multiply by a map that lies in a buffer of this type?
static bool buft_supported(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, const ggml_tensor * host) {
    const ggml_init_params params = { 4*ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx { ggml_init(params) };

    ggml_tensor * w = ggml_dup_tensor(ctx.get(), host);
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, w->ne[0], 512);

    ggml_backend_buffer_ptr buf { ggml_backend_buft_alloc_buffer(buft, 0) };
    w->buffer = buf.get();
    const bool res = buf && ggml_backend_dev_supports_op(dev, ggml_mul_mat(ctx.get(), w, x));
    w->buffer = nullptr;

    return res;
}

// Where the layer's own projections lie: on its device, and if the model was repacked for fast kernels, in that format.
static ggml_backend_buffer_type_t buft_for_layer(const llama_model & model, int32_t il, const ggml_tensor * host) {
    auto * dev = model.dev_layer(il);

    for (const ggml_tensor * t : { model.layers[il].wk, model.layers[il].wqkv, model.layers[il].ffn_up, model.layers[il].wo }) {
        auto * buft = t && t->buffer ? ggml_backend_buffer_get_type(t->buffer) : nullptr;
        // buffers over a mapped file cannot be allocated, they are host memory like the default
        if (buft && ggml_backend_buft_get_device(buft) == dev && !ggml_backend_buft_is_host(buft) && buft_supported(dev, buft, host)) {
            return buft;
        }
    }

    return ggml_backend_dev_buffer_type(dev);
}

ggml_tensor * llama_ridge_placer::place(ggml_backend_buffer_type_t buft, const ggml_tensor * host) {
    auto & alloc = allocs[buft];
    if (!alloc.ctx) {
        const ggml_init_params params = { n_max*ggml_tensor_overhead(), nullptr, true };
        alloc.ctx.reset(ggml_init(params));
    }

    ggml_tensor * t = ggml_dup_tensor(alloc.ctx.get(), host);
    ggml_set_name(t, host->name);
    alloc.tensors.push_back({ t, host });

    return t;
}

ggml_tensor * llama_ridge_placer::matrix(int32_t il, const ggml_tensor * host) {
    return host ? place(buft_for_layer(model, il, host), host) : nullptr;
}

ggml_tensor * llama_ridge_placer::vector(int32_t il, const ggml_tensor * host) {
    return host ? place(ggml_backend_dev_buffer_type(model.dev_layer(il)), host) : nullptr;
}

size_t llama_ridge_placer::alloc::size() const {
    size_t res = 0;
    for (const auto & it : tensors) {
        res += ggml_nbytes(it.second);
    }
    return res;
}

bool llama_ridge_placer::upload(llama_ridge_placed & placed, const char * what) {
    for (auto & [buft, alloc] : allocs) {
        ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(alloc.ctx.get(), buft) };
        if (!buf) {
            llama_ridge_fail(LLAMA_RIDGE_ERR_NO_MEMORY, "could not allocate %.1f MiB for the %s in a buffer of type %s",
                    alloc.size()/1024.0/1024.0, what, ggml_backend_buft_name(buft));
            return false;
        }
        ggml_backend_buffer_set_usage(buf.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

        for (const auto & [t, host] : alloc.tensors) {
            ggml_backend_tensor_set(t, host->data, 0, ggml_nbytes(host));
        }

        LLAMA_LOG_INFO("%s: %10s ridge %s buffer size = %8.2f MiB\n", __func__,
                ggml_backend_buffer_name(buf.get()), what, ggml_backend_buffer_get_size(buf.get())/1024.0/1024.0);

        placed.bufs.push_back(std::move(buf));
        placed.ctxs.push_back(std::move(alloc.ctx));
    }

    return true;
}

size_t llama_ridge_placed::size() const {
    size_t res = 0;
    for (const auto & buf : bufs) {
        res += ggml_backend_buffer_get_size(buf.get());
    }
    return res;
}
