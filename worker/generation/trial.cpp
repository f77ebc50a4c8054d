#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "ipc/channel/dtype.h"
#include "worker/generation/engine.h"

namespace bulkhead::worker::generation {
namespace {

/// A prompt of zeros. Unread pages of a long one take no memory.
class ZeroPrompt {
public:
    ZeroPrompt(const Shape& shape, std::uint32_t length) : length_{length} {
        for (const config::TensorSpec& input : shape.inputs) {
            auto& dims = dims_.emplace_back();
            std::size_t count = 1;
            for (const auto& dim : input.shape) {
                dims.push_back(dim.name == "T" ? std::int64_t{length} : dim.min);
                count *= static_cast<std::size_t>(dims.back());
            }
            const std::size_t size = element_size(input.dtype);
            auto& bytes = bytes_.emplace_back(static_cast<std::byte*>(std::calloc(count, size)));
            if (!bytes) throw std::bad_alloc{};
            views_.push_back({input.name, input.dtype, dims, {bytes.get(), count * size}});
        }
    }
    [[nodiscard]] Prompt get() const { return {views_, length_}; }

private:
    struct Free {
        void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
    };
    std::uint32_t length_;
    std::vector<std::vector<std::int64_t>> dims_;
    std::vector<std::unique_ptr<std::byte[], Free>> bytes_;
    std::vector<TensorView> views_;
};

Result<> start_all(Engine& engine) {
    const std::vector<std::int64_t> first_input(engine.shape().codebooks, 0);
    Start start;
    start.first_input = first_input;
    for (std::uint32_t slot = 0; slot < engine.shape().slots; ++slot)
        if (auto reset = engine.reset(slot, start); !reset) return reset;
    return {};
}

/// Treats the positions before the chunk as computed: their KV holds zeros.
Result<> try_end_of_longest_prompt(Engine& engine, std::uint32_t chunk) {
    const std::uint32_t length = engine.shape().length;
    const std::uint32_t count = std::min({chunk, engine.shape().chunk_max, length});
    const ZeroPrompt prompt{engine.shape(), length};
    Start start;
    start.keep = length - count;
    if (auto reset = engine.reset(0, start); !reset) return reset;
    return engine.prefill(0, prompt.get(), start.keep, count, false);
}

/// Zeros are ordinary tokens, so an intact model gives finite logits. As embeddings they are
/// unusual inputs.
Result<> collect(Engine& engine) {
    const auto collected = engine.collect();
    if (!collected) return collected.error();
    if (engine.shape().embeddings || std::ranges::none_of(*collected, &StepToken::not_finite)) return {};
    return Error{ErrorCode::package_incompatible, "the model's logits are not finite", std::string{mend_not_finite}};
}

}  // namespace

Result<> try_once(Engine& engine, std::uint32_t longest_chunk) {
    const Shape& shape = engine.shape();
    if (longest_chunk > 0)
        if (auto tried = try_end_of_longest_prompt(engine, longest_chunk); !tried) return tried;
    if (auto started = start_all(engine); !started) return started;
    const ZeroPrompt prompt{shape, std::min(2U, shape.length - 2)};
    const std::uint32_t length = prompt.get().length;
    if (auto read = engine.prefill(0, prompt.get(), 0, length, true); !read) return read;
    if (shape.prefill_gives)
        if (auto collected = collect(engine); !collected) return collected;
    for (std::uint32_t n = 1; n <= shape.slots; n *= 2) {
        if (auto launched = engine.launch(n); !launched) return launched;
        if (auto collected = collect(engine); !collected) return collected;
    }
    engine.forget_counts();
    return start_all(engine);
}

}  // namespace bulkhead::worker::generation
