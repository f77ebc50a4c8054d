#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>

#include <ATen/ops/allclose.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/cuda/capture.h"
#include "worker/cuda/cuda_device.h"
#include "worker/cuda/slot_memory.h"
#include "worker/generation/models/package.h"
#include "worker/generation/models/prompt_chunk.h"

namespace bulkhead::worker::cuda {
namespace {

using generation::Engine;
using generation::Manifest;
using generation::Parts;
using generation::Prompt;
using generation::Start;
using generation::StepToken;

/// The numbers of sequences to capture: 1, 2, 4, 8 … and all slots.
std::vector<std::uint32_t> captured_counts(std::uint32_t slots) {
    std::vector<std::uint32_t> counts;
    for (std::uint32_t n = 1; n < slots; n *= 2) counts.push_back(n);
    counts.push_back(slots);
    return counts;
}

class CudaEngine final : public Engine {
public:
    CudaEngine(Parts parts, c10::cuda::CUDAStream stream)
        : parts_{std::move(parts)}, stream_{stream}, memory_{parts_.manifest}, counts_{captured_counts(shape().slots)},
          slots_(shape().slots), tokens_(std::size_t{shape().slots} * shape().codebooks) {
        for (cudaEvent_t& event : begun_) C10_CUDA_CHECK(cudaEventCreate(&event));
        for (cudaEvent_t& event : done_) C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
        for (std::uint32_t slot = 0; slot < shape().slots; ++slot) restart(slot, start_of(Start{}));
    }

    Result<> capture_all(config::Graphs graphs, const LoadContext& context);

    [[nodiscard]] const generation::Shape& shape() const noexcept override { return parts_.manifest.shape; }
    [[nodiscard]] std::uint32_t launches_ahead() const noexcept override { return 2; }
    Result<> reset(std::uint32_t slot, const Start& start) override {
        const auto made = generation::start_slot(parts_.manifest.draw, start);
        if (!made) return made.error();
        return guarded("starting a sequence", [&] { restart(slot, *made); });
    }
    Result<> set_sampling(std::uint32_t slot, const generation::Sampling& sampling) override {
        return guarded("changing how a sequence draws",
                       [&] { memory_.write_sampling(slot, sampling, stream_.stream()); });
    }
    Result<> prefill(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count,
                     bool last) override {
        return guarded("computing a prompt", [&] { compute(slot, prompt, first, count, last); });
    }
    Result<> exchange(std::uint32_t a, std::uint32_t b) override;
    Result<> copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) override;
    Result<> launch(std::uint32_t n) override {
        return guarded("launching a step", [&] { queue_step(n); });
    }
    Result<std::span<const StepToken>> collect() override;
    void forget_counts() override {
        const std::lock_guard lock{mutex_};
        steps_.clear();
        eager_ = moves_ = copies_ = 0;
        device_ms_ = 0;
    }
    [[nodiscard]] boost::json::object counters() const override;

private:
    /// What the host must know of a slot; the rest is on the device.
    struct HostSlot {
        std::uint32_t position_max = 0;  ///< the position is this or, if the sequence
                                         ///< has stopped, less
        std::uint32_t filled = 0;        ///< positions written since the KV was last known to
                                         ///< be all numbers
        bool tainted = false;            ///< no step has shown yet that the KV is all numbers, or
                                         ///< one showed it is not
    };
    struct Bucket {
        std::uint32_t sequences;
        std::uint32_t length;
        auto operator<=>(const Bucket&) const = default;
    };
    struct Pending {
        std::uint32_t turn;
        std::uint32_t first;
        std::vector<std::uint32_t> lies;  ///< by i: the slot that holds it now;
                                          ///< `nowhere`: reset since
        bool is_step;                     ///< false: a prompt's end
    };
    static constexpr std::uint32_t nowhere = 0xffff'ffffU;

    Result<> guarded(std::string_view attempt, const auto& work) {
        try {
            const c10::InferenceMode no_autograd;
            const c10::cuda::CUDAStreamGuard guard{stream_};
            work();
            return {};
        } catch (const std::exception& exception) {
            Error error = explain(exception, ErrorCode::inference_failed, attempt);
            end_if_context_is_lost();
            return error;
        }
    }
    void restart(std::uint32_t slot, const generation::SlotStart& start);
    void compute(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count, bool last);
    void queue_step(std::uint32_t n);
    [[nodiscard]] generation::SlotStart start_of(const Start& start) const {
        return generation::start_slot(parts_.manifest.draw, start).value();
    }
    const Parts::Decode* function_for(std::uint32_t n) const;
    at::Tensor step(std::uint32_t n, std::uint32_t length);
    std::optional<CaptureDiagnosis> capture(const Bucket& bucket);
    void reset_all();
    void activate(std::uint32_t n);
    /// The shortest attention length of a bucket that holds `positions`.
    [[nodiscard]] std::uint32_t bucket_length(std::uint32_t positions) const {
        return *std::ranges::lower_bound(shape().buckets, std::min(positions, shape().length));
    }
    void expect_room() const {
        TORCH_CHECK(pending_.size() + 1 < given_turns, "a step was launched before earlier ones were collected");
    }
    /// The work queued for slots [first, first + n) delivers its tokens in this turn.
    void await(std::uint32_t first, std::uint32_t n, bool is_step);
    void read(const Pending& pending);

    Parts parts_;
    c10::cuda::CUDAStream stream_;
    SlotMemory memory_;
    std::vector<std::uint32_t> counts_;
    std::optional<CapturePool> pool_;
    std::map<Bucket, CapturePool::Captured> graphs_;
    std::vector<HostSlot> slots_;
    std::array<cudaEvent_t, given_turns> begun_{};  ///< of the launch in that turn
    std::array<cudaEvent_t, given_turns> done_{};
    std::uint32_t active_ = 0;  ///< the value of `DeviceSlots::active`,
                                ///< in stream order
    std::uint32_t turn_ = 0;    ///< counts along with `DeviceSlots::turn`
    std::deque<Pending> pending_;
    std::vector<std::int32_t> tokens_;  ///< [slots, C], of the launch collected last
    std::vector<StepToken> given_;
    std::string_view eager_reason_ = "graphs_off";

    mutable std::mutex mutex_;  ///< guards the counters
    std::map<Bucket, std::uint64_t> steps_;
    std::uint64_t eager_ = 0;
    std::map<Bucket, std::string> failures_;
    std::uint64_t moves_ = 0;
    std::uint64_t copies_ = 0;
    double device_ms_ = 0;  ///< of collected steps, each from its place in the stream to
                            ///< its last kernel
};

const Parts::Decode* CudaEngine::function_for(std::uint32_t n) const {
    for (const Parts::Decode& decode : parts_.decode)
        if (n >= decode.sequences_min && n <= decode.sequences_max) return &decode;
    return nullptr;
}

/// Queues one whole step. Returns its logits.
at::Tensor CudaEngine::step(std::uint32_t n, std::uint32_t length) {
    const Parts::Decode* function = function_for(n);
    TORCH_CHECK(function != nullptr, "no decode function of the package takes ", n, " sequences");
    stage_inputs(memory_.slots(), n, stream_.stream());
    const at::Tensor logits =
        function->function
            ->call(memory_.decode_inputs(n, length, parts_.manifest.rope_delta != Manifest::RopeDelta::none))
            .at(0);
    TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous() && logits.is_cuda() &&
                    logits.numel() == std::int64_t{n} * shape().rows * shape().codebooks * shape().vocabulary,
                "the package returned logits ", logits.scalar_type(), " ", logits.sizes(), " for ", n, " sequences");
    draw_and_advance(memory_.slots(), logits.const_data_ptr<float>(), 0, n, true, stream_.stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return logits;
}

void CudaEngine::reset_all() {
    generation::Start start;
    const std::vector<std::int64_t> first_input(shape().codebooks, 0);
    start.first_input = first_input;
    for (std::uint32_t slot = 0; slot < shape().slots; ++slot) restart(slot, start_of(start));
}

Result<> CudaEngine::capture_all(config::Graphs graphs, const LoadContext& context) {
    if (graphs == config::Graphs::off) return {};
    eager_reason_ = "capture_failed";
    std::vector<Bucket> buckets;
    for (const std::uint32_t length : shape().buckets)
        for (const std::uint32_t n : counts_)
            if (function_for(n) != nullptr) buckets.push_back({n, length});
    std::ranges::stable_sort(buckets, std::greater{},
                             [](const Bucket& b) { return std::uint64_t{b.sequences} * b.length; });
    pool_.emplace();
    for (std::size_t done = 0; done < buckets.size(); ++done) {
        const Bucket& bucket = buckets[done];
        const std::string what = fmt::format("{} sequences x {} positions", bucket.sequences, bucket.length);
        context.report("capturing", done, buckets.size(), "steps", what);
        const auto failure = capture(bucket);
        if (!failure) continue;
        if (graphs == config::Graphs::required && failure->cause == "out_of_memory")
            return Error{ErrorCode::out_of_memory, fmt::format("capturing {}: {}", what, failure->sentence()), {}};
        if (graphs == config::Graphs::required)
            return Error{ErrorCode::capture_failed, fmt::format("capturing {}: {}", what, failure->sentence()),
                         fmt::format("{}; or set graphs: preferred to step such sequences eagerly", failure->remedy)};
        spdlog::warn("not captured: step of {} cause={} reason=\"{}\" hint=\"{}\"", what, failure->cause,
                     failure->sentence(), failure->remedy);
        const std::lock_guard lock{mutex_};
        failures_[bucket] = failure->sentence();
    }
    context.report("capturing", buckets.size(), buckets.size(), "steps", "");
    reset_all();
    return {};
}

/// Warms up, captures, and compares a replay with an eager step from the same state.
std::optional<CaptureDiagnosis> CudaEngine::capture(const Bucket& bucket) {
    const auto [n, length] = bucket;
    activate(n);
    at::Tensor eager;
    for (int run = 0; run < warm_up_runs; ++run) {
        reset_all();
        eager = step(n, length).clone();
        ++turn_;
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_.stream()));
    c10::cuda::CUDACachingAllocator::emptyCache();  // frees what warm-up used for the pool
    CapturePool::Captured captured = pool_->capture([&] { return std::vector{step(n, length)}; });
    if (captured.failure) {
        C10_CUDA_CHECK(cudaDeviceSynchronize());
        return captured.failure;
    }
    reset_all();
    captured.graph->replay();
    ++turn_;
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_.stream()));
    const Manifest& manifest = parts_.manifest;
    const bool exact = manifest.weights_dtype == wire::DType::float32 && manifest.kv_dtype == wire::DType::float32;
    const double tolerance = exact ? 1e-3 : 2e-2;  // as precise as the narrower dtype
    if (!at::allclose(eager, captured.outputs.at(0), tolerance, tolerance, /*equal_nan=*/true))
        return replay_differs("logits");
    graphs_.emplace(bucket, std::move(captured));
    return std::nullopt;
}

void CudaEngine::restart(std::uint32_t slot, const generation::SlotStart& start) {
    HostSlot& here = slots_[slot];
    const auto keep = static_cast<std::uint32_t>(start.state.position);
    for (Pending& pending : pending_)  // a step without a known outcome may have tainted it
        for (std::uint32_t& lies : pending.lies)
            if (lies == slot) {
                lies = nowhere;
                here.tainted = true;
            }
    if (here.tainted) clear_kv(memory_.kv(), slot, keep, here.filled, stream_.stream());
    here = {keep, here.tainted ? keep : std::max(here.filled, keep), false};
    memory_.write(slot, start, stream_.stream());
}

void CudaEngine::compute(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count,
                         bool last) {
    HostSlot& here = slots_[slot];
    TORCH_CHECK(parts_.prefill != nullptr, "the package has no prefill function");
    TORCH_CHECK(here.position_max == first && count > 0 && first + count <= shape().length, "positions ", first, " to ",
                first + count, " of a prompt do not follow what the slot holds, ", here.position_max);
    std::vector<at::Tensor> inputs;
    // Attention has a bucket's length and the chunk is padded, so that the chunks of all prompts
    // have few shapes.
    const at::Tensor span = memory_.span(bucket_length(first + count));
    const std::int64_t rows = generation::static_rows(*parts_.manifest.prefill, count);
    for (const at::Tensor& argument : generation::prompt_chunk(parts_.manifest, prompt, first, count, rows, span))
        inputs.push_back(argument.is_cuda() ? argument : memory_.upload(argument, stream_.stream()));
    for (const at::Tensor& buffer : memory_.kv_of(slot)) inputs.push_back(buffer);
    here.tainted = true;
    here.filled = std::max(here.filled, first + count);
    const at::Tensor result = parts_.prefill->call(inputs).at(0);
    note_allocator_memory();
    here.position_max = first + count;
    set_position(memory_.slots(), slot, here.position_max, generation::rope_delta_of(parts_.manifest, prompt),
                 stream_.stream());
    if (!last || !shape().prefill_gives) return;

    expect_room();
    TORCH_CHECK(result.scalar_type() == at::kFloat &&
                    result.numel() == std::int64_t{shape().rows} * shape().codebooks * shape().vocabulary,
                "the package returned logits ", result.scalar_type(), " ", result.sizes());
    const at::Tensor logits = result.contiguous();
    activate(1);
    draw_and_advance(memory_.slots(), logits.const_data_ptr<float>(), slot, 1, false, stream_.stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    await(slot, 1, false);
}

Result<> CudaEngine::exchange(std::uint32_t a, std::uint32_t b) {
    if (a == b) return {};
    return guarded("moving a sequence", [&] {
        exchange_slots(memory_.slots(), memory_.kv(), a, b, std::max(slots_[a].filled, slots_[b].filled),
                       stream_.stream());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        std::swap(slots_[a], slots_[b]);
        for (Pending& pending : pending_)
            for (std::uint32_t& lies : pending.lies)
                if (lies == a || lies == b) lies = lies == a ? b : a;
        const std::lock_guard lock{mutex_};
        ++moves_;
    });
}

Result<> CudaEngine::copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) {
    return guarded("copying a prefix", [&] {
        copy_kv(memory_.kv(), from, to, length, stream_.stream());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        slots_[to].filled = std::max(slots_[to].filled, length);
        const std::lock_guard lock{mutex_};
        ++copies_;
    });
}

void CudaEngine::queue_step(std::uint32_t n) {
    expect_room();
    // Rows up to the next captured number run too: they write KV only where their slots' next
    // tokens would go.
    const auto count = *std::ranges::lower_bound(counts_, n);
    std::uint32_t longest = 0;
    for (std::uint32_t slot = 0; slot < count; ++slot) {
        HostSlot& here = slots_[slot];
        if (slot < n) longest = std::max(longest, here.position_max + 1);
        here.filled = std::min(std::max(here.filled, here.position_max + 1), shape().length);
        if (slot < n) here.position_max = std::min(here.position_max + 1, shape().length);
    }
    const Bucket bucket{count, bucket_length(longest)};
    activate(n);
    C10_CUDA_CHECK(cudaEventRecord(begun_[turn_ % given_turns], stream_.stream()));
    const auto graph = graphs_.find(bucket);
    if (graph != graphs_.end())
        graph->second.graph->replay();
    else
        (void)step(count, bucket.length);
    await(0, n, true);
    const std::lock_guard lock{mutex_};
    ++steps_[bucket];
    if (graph == graphs_.end()) ++eager_;
}

/// Sets `DeviceSlots::active`, which a captured step reads, so that a graph of 4 serves 3.
void CudaEngine::activate(std::uint32_t n) {
    if (active_ == n) return;
    set_active(memory_.slots(), n, stream_.stream());
    active_ = n;
}

void CudaEngine::await(std::uint32_t first, std::uint32_t n, bool is_step) {
    C10_CUDA_CHECK(cudaEventRecord(done_[turn_ % given_turns], stream_.stream()));
    Pending& pending = pending_.emplace_back(Pending{turn_, first, std::vector<std::uint32_t>(n), is_step});
    std::iota(pending.lies.begin(), pending.lies.end(), first);
    ++turn_;
}

Result<std::span<const StepToken>> CudaEngine::collect() {
    if (pending_.empty()) return Error{ErrorCode::internal, "collecting a step: none was launched", {}};
    const auto done = guarded("waiting for a step", [&] {
        const Pending oldest = std::move(pending_.front());
        pending_.pop_front();
        const std::size_t turn = oldest.turn % given_turns;
        C10_CUDA_CHECK(cudaEventSynchronize(done_[turn]));
        float took_ms = 0;
        if (oldest.is_step) C10_CUDA_CHECK(cudaEventElapsedTime(&took_ms, begun_[turn], done_[turn]));
        read(oldest);
        const std::lock_guard lock{mutex_};
        device_ms_ += took_ms;
    });
    if (!done) return done.error();
    return std::span<const StepToken>{given_};
}

void CudaEngine::read(const Pending& pending) {
    const std::size_t codebooks = shape().codebooks;
    given_.clear();
    for (std::uint32_t i = 0; i < pending.lies.size(); ++i) {
        const std::uint32_t slot = pending.first + i;
        const GivenStep& given =
            memory_.slots().given[(pending.turn % given_turns) * std::size_t{shape().slots} + slot];
        std::int32_t* tokens = tokens_.data() + slot * codebooks;
        std::copy_n(given.tokens, codebooks, tokens);
        given_.push_back({slot, {tokens, codebooks}, given.stop != 0, given.not_finite != 0});
        // Finite logits: all the KV that produced them is finite.
        if (pending.lies[i] != nowhere) slots_[pending.lies[i]].tainted = given.not_finite != 0;
    }
}

boost::json::object CudaEngine::counters() const {
    const std::lock_guard lock{mutex_};
    boost::json::array buckets;
    for (const auto& [bucket, steps] : steps_)
        buckets.push_back({{"sequences", bucket.sequences}, {"length", bucket.length}, {"steps", steps}});
    boost::json::object eager;
    if (eager_ > 0) eager[eager_reason_] = eager_;
    boost::json::array failures;
    for (const auto& [bucket, reason] : failures_)
        failures.push_back({{"sequences", bucket.sequences}, {"length", bucket.length}, {"reason", reason}});
    return {{"buckets", std::move(buckets)},
            {"eager", std::move(eager)},
            {"failures", std::move(failures)},
            {"moves", moves_},
            {"copies", copies_},
            {"device_ms", device_ms_}};
}

}  // namespace

Result<std::shared_ptr<Engine>> make_generation_engine(Parts parts, config::Graphs graphs, const LoadContext& context,
                                                       c10::cuda::CUDAStream stream) {
    auto& engine = *new CudaEngine{std::move(parts), stream};
    if (auto captured = engine.capture_all(graphs, context); !captured) return captured.error();
    // Never deleted: CUDA objects live until the process ends.
    return std::shared_ptr<Engine>{&engine, [](Engine* /*lives on*/) {}};
}

}  // namespace bulkhead::worker::cuda
