/// Warm-up, capture, replay, copies and events of a model's graphs, in the order in which the
/// runtime is asked for them.

#include <array>
#include <functional>

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn_like.h>

#include "tests/gpu/order/on_fake_runtime.h"
#include "worker/cuda/limits.h"

namespace bulkhead::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
using worker::TensorView;

constexpr std::int64_t floats = 512;

/// A model of one kernel; `also` is what it does besides.
class Doubles final : public worker::Runtime {
public:
    std::function<void(const at::Tensor&)> also = [](const at::Tensor&) {};
    int calls = 0;
    std::vector<at::Tensor> call(const config::MethodSpec& /*only one*/, const std::vector<at::Tensor>& inputs,
                                 const std::vector<config::ParameterValue>& /*none*/) override {
        ++calls;
        also(inputs[0]);
        return {at::mul(inputs[0], 2)};
    }
    void reset() override {}
};

/// Room of a client: on the host, where it is not registered, or on the device.
class Room final : public worker::OutputSink {
public:
    explicit Room(bool on_device) : on_device_{on_device} {}
    Result<std::span<std::byte>> allocate(std::string_view, wire::DType, std::span<const std::int64_t>) override {
        return std::span{bytes};
    }
    [[nodiscard]] bool on_device() const noexcept override { return on_device_; }
    Result<> begin_on(void* stream) override {
        began_on = stream;
        began_at = fake_cudart::calls().size();
        return {};
    }
    Result<> end_on(void* stream) override {
        ended_on = stream;
        ended_at = fake_cudart::calls().size();
        return {};
    }
    std::array<std::byte, floats * sizeof(float)> bytes{};
    void* began_on = nullptr;
    void* ended_on = nullptr;
    std::size_t began_at = 0;  ///< so many calls came before
    std::size_t ended_at = 0;

private:
    const bool on_device_;
};

class GraphOrder : public OnFakeRuntime {
protected:
    void SetUp() override {
        OnFakeRuntime::SetUp();
        if (HasFatalFailure()) return;
        spec.name = "doubles";
        spec.graphs = config::Graphs::required;
        config::MethodSpec method;
        method.inputs = {{"x", wire::DType::float32, {{1, 8}, {64, 64}}}};
        method.outputs = {{"y", wire::DType::float32, {{1, 8}, {64, 64}}}};
        method.buckets = {{{{8, 64}}}};
        methods = {method};
    }
    [[nodiscard]] Result<> prepare() {
        worker::LoadContext context;
        context.cuda = true;
        return device->prepare(spec, methods, model, context);
    }
    /// The calls of one request for the bucket.
    Calls request(bool on_device, Room& room) {
        std::array<std::byte, floats * sizeof(float)> input{};
        const std::array<std::int64_t, 2> dims{8, 64};
        const std::array<TensorView, 1> views{TensorView{"x", wire::DType::float32, dims, input, on_device}};
        fake_cudart::forget();
        const Result<> done = device->run(model, methods[0], views, {}, room);
        EXPECT_TRUE(done) << (done ? "" : done.error().text());
        return fake_cudart::calls();
    }
    [[nodiscard]] std::int64_t copies(std::string_view direction) const {
        return device->graphs().at("copies").at(direction).to_number<std::int64_t>();
    }

    config::ModelSpec spec;
    std::vector<config::MethodSpec> methods;
    Doubles model;
};

TEST_F(GraphOrder, ALoadWarmsUpWaitsCapturesAndComparesAReplay) {
    std::vector<std::size_t> called_at;  // so many calls came before
    model.also = [&](const at::Tensor&) { called_at.push_back(fake_cudart::calls().size()); };
    const Result<> prepared = prepare();
    ASSERT_TRUE(prepared) << prepared.error().text();
    const Calls calls = fake_cudart::calls();

    EXPECT_EQ(model.calls, worker::cuda::warm_up_runs + 1) << "as often as it warms up, and once captured";
    for (const char* once : {"cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiateWithFlags",
                             "cudaGraphLaunch"})
        EXPECT_EQ(count(calls, once), 1) << once;
    expect_legal_captures(calls);

    const Calls warm_up = before(calls, "cudaStreamBeginCapture");
    EXPECT_GE(count(warm_up, "kernel"), worker::cuda::warm_up_runs);
    const auto waits = std::find_if(warm_up.rbegin(), warm_up.rend(), [](const Call& call) {
        return call.ours && call.name == "cudaStreamSynchronize";
    });
    ASSERT_NE(waits, warm_up.rend()) << "what was warmed up has ended before the capture begins";
    EXPECT_EQ(waits->stream, calls[warm_up.size()].stream);
    EXPECT_GT(warm_up.rend() - waits - 1, called_at.at(worker::cuda::warm_up_runs - 1)) << "the last run among it";

    const Calls captured = between(calls, "cudaStreamBeginCapture", "cudaStreamEndCapture");
    EXPECT_EQ(count(captured, "kernel"), 1) << "the model's one kernel";
    EXPECT_THAT(names(ours(captured)), IsEmpty());

    const Calls replay = after(calls, "cudaStreamEndCapture");
    EXPECT_THAT(names(ours(between(replay, "cudaGraphInstantiateWithFlags", "cudaGraphLaunch"))), IsEmpty());
    const Calls compared = ours(after(replay, "cudaGraphLaunch"));
    ASSERT_FALSE(compared.empty());
    EXPECT_EQ(compared.front().name, "cudaStreamSynchronize") << "a replay is compared when it has ended";
}

TEST_F(GraphOrder, WhatTorchsAllocatorHasIsToldAsOfTheLastRunThatAskedItForMemory) {
    const auto told = [this](std::string_view what) { return device->graphs().at(what).to_number<std::uint64_t>(); };
    constexpr std::uint64_t more = 64ULL << 20;
    spec.graphs = config::Graphs::off;
    ASSERT_TRUE(prepare());
    const std::uint64_t allocated = told("allocated_bytes"), reserved = told("reserved_bytes");
    EXPECT_GE(reserved, allocated);

    at::Tensor kept;
    model.also = [&](const at::Tensor& input) { kept = at::empty({more}, input.options().dtype(at::kByte)); };
    Room room{false};
    request(false, room);
    EXPECT_GE(told("allocated_bytes"), allocated + more);
    EXPECT_GE(told("reserved_bytes"), reserved + more);

    model.also = [&](const at::Tensor&) { kept.reset(); };
    request(false, room);
    EXPECT_LT(told("allocated_bytes"), allocated + more);
    EXPECT_GE(told("reserved_bytes"), reserved + more) << "it keeps what it had from the driver";
    EXPECT_GE(told("peak_bytes"), told("reserved_bytes"));
}

TEST_F(GraphOrder, AReplayBetweenTensorsOnTheGpuHasOneCopyInAndOneOutAndNobodyWaits) {
    ASSERT_TRUE(prepare());
    Room room{true};
    const std::int64_t before_it = copies("device_to_device");

    const Calls calls = request(true, room);

    EXPECT_THAT(names(calls), ElementsAre("cudaEventSynchronize", "cudaMemcpyAsync D2D", "cudaGraphLaunch",
                                          "cudaMemcpyAsync D2D", "cudaEventRecord"));
    EXPECT_EQ(room.began_at, 1U) << "behind the client's work, before the first copy";
    EXPECT_EQ(room.ended_at, 4U) << "behind the last copy";
    for (const std::size_t at : {1U, 2U, 3U, 4U}) EXPECT_EQ(calls.at(at).stream, room.began_on) << calls[at].name;
    EXPECT_EQ(room.ended_on, room.began_on);
    EXPECT_EQ(copies("device_to_device"), before_it + 2);
}

TEST_F(GraphOrder, AnEagerRunComesBehindTheClientsWorkAndBehindAResetOnTheDefaultStream) {
    spec.graphs = config::Graphs::off;
    ASSERT_TRUE(prepare());
    Room room{true};
    request(true, room);  // memory comes from the cache by now

    const Calls calls = request(true, room);

    EXPECT_THAT(names(calls), ElementsAre("cudaEventSynchronize", "cudaEventRecord", "cudaStreamWaitEvent", "kernel",
                                          "cudaMemcpyAsync D2D", "cudaEventRecord"));
    EXPECT_EQ(room.began_at, 1U);
    EXPECT_EQ(room.ended_at, 5U);
    EXPECT_EQ(calls.at(1).stream, nullptr) << "the default stream";
    EXPECT_EQ(calls.at(1).event, calls.at(2).event);
    for (const std::size_t at : {2U, 3U, 4U, 5U}) EXPECT_EQ(calls.at(at).stream, room.began_on) << calls[at].name;
}

TEST_F(GraphOrder, SoManyRequestsMayBeUnfinishedAndTheNextOneWaitsForTheOldest) {
    ASSERT_TRUE(prepare());
    Room room{true};
    std::vector<void*> recorded;
    for (std::size_t i = 0; i < worker::cuda::queued_requests_max + 2; ++i) {
        const Calls calls = request(true, room);
        ASSERT_EQ(calls.front().name, "cudaEventSynchronize");
        ASSERT_EQ(calls.back().name, "cudaEventRecord");
        recorded.push_back(calls.back().event);
        const std::size_t back = worker::cuda::queued_requests_max;
        EXPECT_TRUE(i < back || calls.front().event == recorded[i - back]) << i;
    }
    EXPECT_NE(recorded[0], recorded[1]);
}

TEST_F(GraphOrder, ARequestFromTheHostGoesThroughPinnedBuffersAndIsAnsweredWhenAllIsRead) {
    ASSERT_TRUE(prepare());
    Room room{false};
    // Pin two buffers each, which hold zeros until a copy into them has ended.
    for (std::size_t i = 0; i < worker::cuda::ring_slots; i += 2) {
        room.bytes = {};
        request(false, room);
        EXPECT_THAT(room.bytes, Each(std::byte{1})) << "as device memory";
    }
    const Calls calls = request(false, room);

    // A free buffer, the copy in, its event; the graph; a free buffer, the copy out, its event and
    // the wait for it; the request's own event and the wait for that.
    EXPECT_THAT(names(calls), ElementsAre("cudaEventSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync H2D",
                                          "cudaEventRecord", "cudaGraphLaunch", "cudaEventSynchronize",
                                          "cudaMemcpyAsync D2H", "cudaEventRecord", "cudaEventSynchronize",
                                          "cudaEventRecord", "cudaEventSynchronize"));
    EXPECT_EQ(calls.at(7).event, calls.at(8).event);
    EXPECT_EQ(calls.at(9).event, calls.at(10).event);
    EXPECT_NE(calls.at(3).event, calls.at(7).event) << "a buffer of its own each";
}

TEST_F(GraphOrder, WhatWaitsWithinACaptureFailsItAndTheModelGoesOnEagerly) {
    spec.graphs = config::Graphs::preferred;
    model.also = [](const at::Tensor& x) { (void)x.sum().item<float>(); };
    ASSERT_TRUE(prepare());
    const Calls calls = fake_cudart::calls();

    EXPECT_EQ(count(calls, "cudaStreamEndCapture"), 1) << "a capture that fails is ended, too";
    EXPECT_EQ(count(calls, "cudaGraphLaunch"), 0);
    EXPECT_EQ(ours(after(calls, "cudaStreamEndCapture")).front().name, "cudaDeviceSynchronize")
        << "a context lost with it is found here";
    EXPECT_EQ(device->graphs().at("failures").at(0).at("cause"), "host_read") << device->graphs();
    model.also = [](const at::Tensor& x) { (void)at::randn_like(x); };  // the generator works again
    Room room{true};
    const Calls eager = request(true, room);
    EXPECT_EQ(count(eager, "cudaGraphLaunch"), 0);
    EXPECT_GE(count(eager, "kernel"), 2);
}

TEST_F(GraphOrder, BetweenTwoCapturesOneThatFailsLeavesBothAndTheirRandomNumbers) {
    spec.graphs = config::Graphs::preferred;
    methods[0].buckets = {{{{8, 64}}}, {{{4, 64}}}, {{{2, 64}}}};  // captured in this order
    model.also = [](const at::Tensor& x) {
        (void)at::randn_like(x);
        if (x.size(0) == 4) (void)x.sum().item<float>();
    };
    ASSERT_TRUE(prepare());
    EXPECT_EQ(device->graphs().at("failures").as_array().size(), 1U) << device->graphs();
    EXPECT_EQ(device->graphs().at("buckets").as_array().size(), 2U) << device->graphs();
    Room room{true};
    EXPECT_EQ(count(request(true, room), "cudaGraphLaunch"), 1) << "of the one that was captured before";
}

TEST_F(GraphOrder, WeightsFillEachBufferOnlyWhenItsLastCopyHasEnded) {
    constexpr std::size_t chunks = 2 * worker::cuda::ring_slots + 1;
    std::vector<std::byte> weight(chunks * worker::cuda::load_slot_bytes);
    const std::array<std::int64_t, 1> dims{static_cast<std::int64_t>(weight.size())};
    const at::Tensor placed = device->place_weight({"w", wire::DType::uint8, dims, weight});
    EXPECT_EQ(placed.nbytes(), weight.size());

    Calls copies;  // buffers are pinned as they are first used: left out here
    for (const Call& call : ours(fake_cudart::calls()))
        if (call.name != "cudaHostAlloc") copies.push_back(call);
    ASSERT_EQ(copies.size(), 3 * chunks);
    EXPECT_EQ(count(fake_cudart::calls(), "cudaHostAlloc"), std::ptrdiff_t{worker::cuda::ring_slots});
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        EXPECT_EQ(copies[3 * chunk].name, "cudaEventSynchronize");
        EXPECT_EQ(copies[3 * chunk + 1].name, "cudaMemcpyAsync H2D");
        EXPECT_EQ(copies[3 * chunk + 2].name, "cudaEventRecord");
        EXPECT_EQ(copies[3 * chunk].event, copies[3 * chunk + 2].event) << "chunk " << chunk;
        const std::size_t last = chunk < worker::cuda::ring_slots ? chunk : chunk - worker::cuda::ring_slots;
        EXPECT_EQ(copies[3 * chunk].event, copies[3 * last].event);
    }
}

}  // namespace
}  // namespace bulkhead::test
