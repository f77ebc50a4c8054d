#include "worker/generation/models/prompt_chunk.h"

#include <algorithm>
#include <bit>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "worker/torch/runtime.h"

namespace bulkhead::worker::generation {
namespace {

const TensorView* find(const Prompt& prompt, std::string_view name) {
    const auto found = std::ranges::find(prompt.inputs, name, &TensorView::name);
    return found == prompt.inputs.end() || found->bytes.empty() ? nullptr : &*found;
}

/// Maps a chunk's rows to the prompt's positions.
struct Rows {
    std::int64_t first;
    std::int64_t count;
    std::int64_t all;  ///< rows from `count` on repeat the last one

    [[nodiscard]] at::Tensor positions() const {
        return at::arange(first, first + all, at::kLong).clamp_max(first + count - 1);
    }
    [[nodiscard]] at::Tensor of(const at::Tensor& whole, std::int64_t dim) const {
        return all == count ? whole.narrow(dim, first, count).contiguous() : whole.index_select(dim, positions());
    }
};

at::Tensor tokens_of(const Manifest& manifest, const Prompt& prompt) {
    const TensorView* tokens = find(prompt, "tokens");
    TORCH_CHECK(tokens != nullptr, "the prompt has no tokens");
    return as_tensor(*tokens).reshape({-1, manifest.shape.codebooks});
}

}  // namespace

std::int64_t static_rows(const Manifest::Prefill& prefill, std::int64_t count) {
    const auto power = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
    return std::clamp<std::int64_t>(power, prefill.chunk_min, prefill.chunk_max);
}

std::vector<at::Tensor> prompt_chunk(const Manifest& manifest, const Prompt& prompt, std::int64_t first,
                                     std::int64_t count, std::int64_t rows, const at::Tensor& span) {
    const Manifest::Prefill& prefill = *manifest.prefill;
    const Rows part{first, count, std::max<std::int64_t>({rows, count, prefill.chunk_min})};
    std::vector<at::Tensor> arguments;
    if (manifest.shape.embeddings) {
        const TensorView* embeddings = find(prompt, "embeddings");
        TORCH_CHECK(embeddings != nullptr, "the prompt has no embeddings");
        arguments.push_back(part.of(as_tensor(*embeddings), 1));
    } else {
        arguments.push_back(part.of(tokens_of(manifest, prompt), 0));
    }
    const at::Tensor positions = part.positions();
    arguments.push_back(positions);
    arguments.push_back(span);
    if (manifest.rope_delta == Manifest::RopeDelta::rope) {
        const TensorView* rope = find(prompt, "rope");
        arguments.push_back(rope != nullptr ? part.of(as_tensor(*rope), 1)
                                            : positions.expand({3, part.all}).contiguous());
    }
    for (const Manifest::Extra& extra : prefill.extras) {
        const auto along = std::ranges::find(extra.dims, Manifest::prompt_dim) - extra.dims.begin();
        if (const TensorView* given = find(prompt, extra.name)) {
            arguments.push_back(part.of(as_tensor(*given), along));
            continue;
        }
        std::vector<std::int64_t> dims = extra.dims;
        dims[static_cast<std::size_t>(along)] = part.all;
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
