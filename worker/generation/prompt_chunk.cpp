#include "worker/generation/prompt_chunk.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "worker/runtime.h"

namespace bulkhead::worker::generation {
namespace {

const TensorView* find(const Prompt& prompt, std::string_view name) {
    const auto found = std::ranges::find(prompt.inputs, name, &TensorView::name);
    return found == prompt.inputs.end() || found->bytes.empty() ? nullptr : &*found;
}

/// Rows of dimension `dim`, one of them twice where the graph wants two.
at::Tensor rows(const at::Tensor& whole, std::int64_t dim, std::int64_t first, std::int64_t count, bool twice) {
    const at::Tensor part = whole.narrow(dim, first, count);
    return (twice ? at::cat({part, part}, dim) : part).contiguous();
}

at::Tensor tokens_of(const Manifest& manifest, const Prompt& prompt) {
    const TensorView* tokens = find(prompt, "tokens");
    TORCH_CHECK(tokens != nullptr, "the prompt has no tokens");
    return as_tensor(*tokens).reshape({-1, manifest.codebooks});
}

}  // namespace

std::vector<at::Tensor> prompt_chunk(const Manifest& manifest, const Prompt& prompt, std::int64_t first,
                                     std::int64_t count, const at::Tensor& span) {
    const Manifest::Prefill& prefill = *manifest.prefill;
    const bool twice = count < prefill.chunk_min;
    std::vector<at::Tensor> arguments;
    if (prefill.embeddings) {
        const TensorView* embeddings = find(prompt, "embeddings");
        TORCH_CHECK(embeddings != nullptr, "the prompt has no embeddings");
        arguments.push_back(rows(as_tensor(*embeddings), 1, first, count, twice));
    } else {
        arguments.push_back(rows(tokens_of(manifest, prompt), 0, first, count, twice));
    }
    const at::Tensor positions = rows(at::arange(first, first + count, at::kLong), 0, 0, count, twice);
    arguments.push_back(positions);
    arguments.push_back(span);
    if (manifest.rope_delta == Manifest::RopeDelta::rope) {
        const TensorView* rope = find(prompt, "rope");
        arguments.push_back(rope != nullptr ? rows(as_tensor(*rope), 1, first, count, twice)
                                            : positions.expand({3, positions.size(0)}).contiguous());
    }
    for (const Manifest::Extra& extra : prefill.extras) {
        const auto along = std::ranges::find(extra.dims, Manifest::prompt_dim) - extra.dims.begin();
        if (const TensorView* given = find(prompt, extra.name)) {
            arguments.push_back(rows(as_tensor(*given), along, first, count, twice));
            continue;
        }
        std::vector<std::int64_t> dims = extra.dims;
        dims[static_cast<std::size_t>(along)] = twice ? 2 : count;
        arguments.push_back(at::zeros(dims, at::TensorOptions{}.dtype(scalar_type(extra.dtype))));
    }
    return arguments;
}

std::int64_t rope_delta_of(const Manifest& manifest, const Prompt& prompt) {
    const auto length = static_cast<std::int64_t>(prompt.length);
    if (manifest.rope_delta == Manifest::RopeDelta::prompt) return -length;
    if (manifest.rope_delta == Manifest::RopeDelta::none) return 0;
    const TensorView* rope = find(prompt, "rope");
    return rope == nullptr ? 0 : as_tensor(*rope).max().item<std::int64_t>() + 1 - length;
}

at::Tensor prompt_tokens(const Manifest& manifest, const Prompt& prompt, std::int64_t index) {
    return tokens_of(manifest, prompt).narrow(0, index, 1).contiguous();
}

}  // namespace bulkhead::worker::generation
