/// A channel whose tensors lie on the GPU: real daemon, a worker that echoes by the driver's own
/// copies, and this process as its client. On a GPU, or on the fake driver ($BULKHEAD_LIBCUDA) and
/// the fake NVML.

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <iterator>
#include <limits>
#include <optional>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/channel.h"
#include "bulkhead/dlpack.h"
#include "ipc/cuda/gpu.h"
#include "ipc/cuda/vmm_slab.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/gpu_channel.h"
#include "tests/support/mappings.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using testing::HasSubstr;

/// Unloads "m" while the client reads what comes when its descriptor is readable, as a program
/// with a loop does.
void expect_let_go_at_unload(Daemon& daemon, Channel& channel) {
    auto asked = std::async(std::launch::async, [&] { return daemon.unload("m"); });
    pollfd readable{channel.fd(), POLLIN, 0};
    while (::poll(&readable, 1, 30'000) > 0 && channel.receive()) {
    }
    const Result<json::object> receipt = asked.get();
    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_FALSE(holds_gpu_slab(*receipt)) << json::serialize(*receipt);
}

/// What both clients promise.
template <typename C>
class GpuClients : public GpuChannel {
protected:
    /// An input on the host comes back on the host, again and again.
    void expect_echoes(C& channel, Input& input) {
        std::ranges::copy(values(2), input.template as<float>().begin());
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &input}};
        for (int i = 0; i < 3; ++i) {
            auto reply = channel.infer({.inputs = inputs});
            ASSERT_TRUE(reply) << reply.error().text();
            EXPECT_FALSE(reply->outputs.at(0).gpu());
            EXPECT_THAT(reply->outputs.at(0).template as<float>(), testing::ElementsAreArray(values(2)));
        }
    }
    static constexpr std::array kinds{wire::SlabKind::cuda_vmm, wire::SlabKind::cuda_ipc};
};
TYPED_TEST_SUITE(GpuClients, BothClients, ClientNames);

TYPED_TEST(GpuClients, InputsOnTheGpuAndOutputsOnTheHostMixInOneChannel) {
    this->start();
    for (const wire::SlabKind kind : this->kinds) {
        auto channel = this->template open<TypeParam>(kind);
        Input input = this->input_on_gpu(channel);
        const std::vector<float> data = this->values(5);
        auto reply = this->echo(channel, input, data);
        ASSERT_TRUE(reply) << reply.error().text();
        EXPECT_FALSE(reply->outputs.at(0).gpu());
        EXPECT_THAT(reply->outputs.at(0).template as<float>(), testing::ElementsAreArray(data));

        const std::array<std::int64_t, 1> dims{this->count};
        Input on_host = channel.allocate(wire::DType::float32, dims).value();
        ASSERT_TRUE(channel.keep_outputs_on_gpu(this->count * sizeof(float)));
        std::ranges::copy(data, on_host.template as<float>().begin());
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &on_host}};
        auto second = channel.infer({.inputs = inputs}).value();
        EXPECT_EQ(this->fetch(second.outputs.at(0)), data);
    }
}

TYPED_TEST(GpuClients, WithoutTheWorkersGpuTheyGetHostSlabsAndTheReason) {
    if (!is_fake_cuda()) GTEST_SKIP() << "a second GPU is made up by the fake alone";
    this->start({}, other_gpu);
    auto channel = this->template open<TypeParam>();
    ASSERT_TRUE(channel.why_no_gpu());
    EXPECT_THAT(channel.why_no_gpu()->attempt, HasSubstr(cuda::to_string(this->gpu->uuid())));
    Input input = this->input_on_gpu(channel);
    EXPECT_FALSE(input.gpu());
    EXPECT_TRUE(channel.keep_outputs_on_gpu(4096));
    this->expect_echoes(channel, input);
}

TYPED_TEST(GpuClients, AnImportThatFailsFallsBackToHostSlabsAndTheChannelLivesOn) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    this->start();
    for (const std::string call : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess",
                                   "cuIpcOpenMemHandle", "cuIpcOpenEventHandle"}) {
        SCOPED_TRACE(call);
        ::unsetenv("BULKHEAD_FAKE_CUDA_FAIL");
        const auto kind = call == "cuIpcOpenMemHandle" ? wire::SlabKind::cuda_ipc : wire::SlabKind::cuda_vmm;
        auto channel = this->template open<TypeParam>(kind);
        auto other = this->template open<TypeParam>(kind);
        ::setenv("BULKHEAD_FAKE_CUDA_FAIL", (call + " 304").c_str(), 1);

        ASSERT_TRUE(channel.keep_outputs_on_gpu(4096));
        Input input = this->input_on_gpu(channel);

        ASSERT_TRUE(channel.why_no_gpu());
        EXPECT_THAT(channel.why_no_gpu()->attempt, HasSubstr(call));
        EXPECT_FALSE(input.gpu());
        this->expect_echoes(channel, input);

        // What fits no host slab yet gets one in its place.
        const std::array<std::int64_t, 1> large{16 << 20};
        const Result<Input> instead = other.allocate_on_gpu(wire::DType::uint8, large);
        ASSERT_TRUE(instead) << instead.error().text();
        EXPECT_FALSE(instead->gpu());
        ASSERT_TRUE(other.why_no_gpu());
        EXPECT_THAT(other.why_no_gpu()->attempt, HasSubstr(call));
    }
}

TYPED_TEST(GpuClients, AWorkerThatCannotMakeTheSlabSaysSoAndServesOn) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    this->echo_daemon->worker_environment += ", MINIMAL_ENV_BULKHEAD_FAKE_CUDA_FAIL: cuMemCreate 2";
    this->start();
    auto channel = this->template open<TypeParam>();
    const std::array<std::int64_t, 1> dims{this->count};
    const auto refused = channel.allocate_on_gpu(wire::DType::float32, dims);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::out_of_memory);
    EXPECT_THAT(refused.error().attempt, HasSubstr("cuMemCreate"));
    Input input = channel.allocate(wire::DType::float32, dims).value();
    this->expect_echoes(channel, input);
}

TEST_F(GpuChannel, ARoomThatIsStillReadIsWrittenAgainOnlyBehindThatRead) {
    start();
    Channel channel = open();
    ASSERT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(channel);
    const std::vector<float> first = values(1);
    const std::vector<float> second = values(1000);
    const PinnedFloats& source = pin(second);
    // On the GPU: a copy to pageable memory would hold up this thread.
    auto seen = cuda::VmmSlab::create(gpu, count * sizeof(float)).value();
    auto reply = echo(channel, input, first);
    ASSERT_TRUE(reply) << reply.error().text();
    ASSERT_TRUE(reply->outputs.at(0).read_on(stream));  // the input is written again below:
                                                        // behind its first use
    synchronize();
    std::optional<Output> output{std::move(reply->outputs.at(0))};
    const std::byte* const room = output->bytes().data();
    cuda::CUstream reader = nullptr;
    StreamGate gate;
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamCreate(&reader, cuda::CU_STREAM_NON_BLOCKING), cuda::CUDA_SUCCESS);
        ASSERT_TRUE(output->read_on(reader));
        ASSERT_EQ(gate.hold(*gpu, reader), cuda::CUDA_SUCCESS);
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(seen.pointer(), reinterpret_cast<cuda::CUdeviceptr>(room),
                                              count * sizeof(float), reader),
                  cuda::CUDA_SUCCESS);
    }

    output.reset();  // given back while its read is queued and held
    auto next = echo(channel, input, source);

    ASSERT_TRUE(next) << next.error().text();
    ASSERT_EQ(next->outputs.at(0).bytes().data(), room) << "the same room, or this shows nothing";
    gate.let_pass();
    EXPECT_EQ(fetch(next->outputs.at(0)), second);
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(reader), cuda::CUDA_SUCCESS);
    }
    std::vector<float> was_read(count);
    copy(was_read.data(), reinterpret_cast<const void*>(seen.pointer()), count * sizeof(float));
    synchronize();
    EXPECT_EQ(was_read, first);
}

TEST_F(GpuChannel, AnInputOnTheHostIsReadBeforeItsResultOnTheGpuComes) {
    start();
    Channel channel = open();
    ASSERT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
    Input held = input_on_gpu(channel);
    const std::array<std::int64_t, 1> dims{count};
    Input on_host = channel.allocate(wire::DType::float32, dims).value();
    std::ranges::copy(values(7), on_host.as<float>().begin());
    const PinnedFloats& source = pin(values(1));
    StreamGate gate;
    hold(gate);

    const auto before = echo(channel, held, source).value();  // from here on, the worker's stream
                                                      // waits for the gate

    auto answered = std::async(std::launch::async, [&] {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &on_host}};
        auto reply = channel.infer({.inputs = inputs});
        std::ranges::fill(on_host.as<float>(), -1.0F);  // as its owner may, once it is answered
        return reply;
    });
    // However long this is, a worker that waits for its copies does not answer; one that errs
    // has the time to.
    EXPECT_EQ(answered.wait_for(std::chrono::milliseconds{300}), std::future_status::timeout);
    gate.let_pass();

    auto reply = answered.get().value();
    EXPECT_EQ(fetch(reply.outputs.at(0)), values(7));
}

TEST_F(GpuChannel, AnUnloadAsksClientsToLetGoAndTheReceiptNamesNobodyWhoDid) {
    start();
    Channel channel = open();
    ASSERT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
    {
        Input input = input_on_gpu(channel);
        ASSERT_TRUE(echo(channel, input, values(1)));
    }
    expect_let_go_at_unload(*daemon, channel);
}

TEST_F(GpuChannel, AnUnloadNamesTheClientThatHoldsOn) {
    start();
    Channel channel = open();
    ASSERT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(channel);
    ASSERT_EQ(input.gpu(), gpu->device());

    const auto receipt = daemon->unload("m");  // this thread is the client, and reads
                                               // nothing meanwhile

    ASSERT_TRUE(receipt) << receipt.error().text();
    const json::object* held = holds_gpu_slab(*receipt);
    ASSERT_TRUE(held) << json::serialize(*receipt);
    EXPECT_GE(held->at("bytes").to_number<std::uint64_t>(), 2 * count * sizeof(float));
    EXPECT_FALSE(receipt->at("verified").as_bool());
}

TEST_F(GpuChannel, AStreamThatADeadClientHoldsForEverEndsItsWorkerWithThatReason) {
    start("deadlines: {request: 200ms}");
    {
        CudaPeer client{{{"BULKHEAD_TEST_SOCKET", daemon->socket().string()}}};
        ASSERT_EQ(client.ask("stream block"), "ok");  // what it records now is never reached
        ASSERT_EQ(client.ask("channel hold m"), "ok");
        client.kill();
    }
    await_restart();  // nobody sends anything more: the worker finds out by itself

    EXPECT_THAT(daemon->why("m"), HasSubstr("freeing slabs of channel"));
    ASSERT_TRUE(daemon->load("m")) << daemon->why("m");
    Channel channel = open();
    Input input = input_on_gpu(channel);
    auto reply = echo(channel, input, values(4)).value();
    EXPECT_THAT(reply.outputs.at(0).as<float>(), testing::ElementsAreArray(values(4)));
}

TEST_F(GpuChannel, AWaitThatTheDriverDoesNotReturnFromHoldsUpItsRequestAlone) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver keeps such a call on demand";
    echo_daemon->worker_environment += ", MINIMAL_ENV_BULKHEAD_FAKE_CUDA_WAITS_BLOCK: \"1\"";
    start("deadlines: {request: 200ms}");
    std::optional<Channel> bystander{open()};
    std::optional<Input> on_gpu{input_on_gpu(*bystander)};
    CudaPeer client{{{"BULKHEAD_TEST_SOCKET", daemon->socket().string()}}};
    ASSERT_EQ(client.ask("stream block"), "ok");
    ASSERT_EQ(client.ask("channel send m"), "ok");
    const auto until = std::chrono::steady_clock::now() + patience;
    const auto blocks = [this] {
        return json::serialize(daemon->call("logs.tail", {{"model", "m"}}).value()).find("a wait blocks");
    };
    while (blocks() == std::string::npos) ASSERT_LT(std::chrono::steady_clock::now(), until);

    on_gpu.reset();
    bystander.reset();  // an event loop that calls the driver now tells nothing more

    await_restart();
    EXPECT_THAT(daemon->why("m"), HasSubstr("forward ran"));
}

/// Slabs in host memory, and those of the fake driver.
std::size_t memfds_mapped(pid_t pid) { return mappings("/memfd:", pid); }
std::ptrdiff_t descriptors(pid_t pid) {
    return std::distance(std::filesystem::directory_iterator{fmt::format("/proc/{}/fd", pid)}, {});
}

TEST_F(GpuChannel, AClientThatDiesLetsGoByDying) {
    start();
    const pid_t worker = daemon->pid("m");
    const std::size_t mapped = memfds_mapped(worker);
    const auto hold = [&] {
        CudaPeer client{{{"BULKHEAD_TEST_SOCKET", daemon->socket().string()}}};
        EXPECT_EQ(client.ask("channel hold m"), "ok");
        EXPECT_EQ(client.ask("stream synchronize"), "ok");  // else the worker waits for its
                                                            // event for ever
        EXPECT_GT(memfds_mapped(worker), mapped);
        client.kill();
    };
    /// A moment after the channel's end has been told.
    const auto await_given_up = [&](std::ptrdiff_t descriptors_most) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{20};
        while (memfds_mapped(worker) != mapped || descriptors(worker) > descriptors_most) {
            ASSERT_LT(std::chrono::steady_clock::now(), until)
                << memfds_mapped(worker) << " memfds are mapped, not " << mapped << "; " << descriptors(worker)
                << " descriptors, not " << descriptors_most;
            (void)daemon->row("m");
        }
    };
    hold();
    await_given_up(std::numeric_limits<std::ptrdiff_t>::max());
    const std::ptrdiff_t after_one = descriptors(worker);  // with what the driver keeps
                                                           // from its first use

    for (int i = 0; i < 3; ++i) hold();

    await_given_up(after_one);
    {
        Channel channel = open();
        Input input = input_on_gpu(channel);
        const std::vector<float> data = values(4);
        ASSERT_TRUE(echo(channel, input, data));
        synchronize();
    }
    const auto row = daemon->row("m");
    EXPECT_EQ(row.at("restarts").as_int64(), 0) << json::serialize(row);
    const Result<json::object> receipt = daemon->unload("m");
    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
    EXPECT_TRUE(receipt->at("held_by").as_array().empty()) << json::serialize(*receipt);
}

TEST_F(GpuChannel, AResultInASlabThatCannotBeImportedFailsItsRequestAlone) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    start("channel: {input: 1MiB, output: 1MiB, max: 16MiB}");
    Channel channel = open();
    constexpr std::int64_t slab_bytes = std::int64_t{2} << 20;
    ASSERT_TRUE(channel.keep_outputs_on_gpu(slab_bytes));
    const std::array<std::int64_t, 1> dims{3 * (slab_bytes / 4) / static_cast<std::int64_t>(sizeof(float))};
    Input input = channel.allocate_on_gpu(wire::DType::float32, dims).value();
    ASSERT_TRUE(input.gpu());
    const std::vector<float> data(static_cast<std::size_t>(dims[0]), 6.0F);
    std::vector<Reply> held;
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemMap 2", 1);
    // Until the worker has to add a slab.
    Result<Reply> reply = echo(channel, input, data);
    for (; reply && held.size() < 8; reply = echo(channel, input, data)) held.push_back(std::move(*reply));

    // It takes their leases back.
    for (int i = 0; i < 10; ++i, reply = echo(channel, input, data)) {
        ASSERT_FALSE(reply);
        EXPECT_EQ(reply.error().code, ErrorCode::out_of_memory) << reply.error().text();
        EXPECT_THAT(reply.error().attempt, HasSubstr("cuMemMap"));
    }
    EXPECT_FALSE(channel.why_no_gpu());
    for (Reply& each : held) EXPECT_EQ(fetch(each.outputs.at(0)), data);

    held.clear();  // so there is room in the slab that is shared
    reply = echo(channel, input, data);
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_EQ(fetch(reply->outputs.at(0)), data);

    // An unload asks for the other one too.
    reply = Error{ErrorCode::internal, "dropped", {}};
    { const Input gone = std::move(input); }
    expect_let_go_at_unload(*daemon, channel);
}

}  // namespace
}  // namespace bulkhead::test
