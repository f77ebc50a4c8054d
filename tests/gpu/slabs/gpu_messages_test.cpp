/// What messages may say of a GPU, spoken by hand: a client to a worker's event loop, a worker to
/// the C++ clients, and a client that dies between any two of its steps.

#include <limits>
#include <optional>

#include <gmock/gmock.h>

#include "bulkhead/channel.h"
#include "clients/cpp/base/limits.h"
#include "tests/fakes/minimal_worker/gpu_echo.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "tests/support/clients/both_clients.h"
#include "tests/support/worker/death_harness.h"
#include "tests/support/worker/page_reader.h"

namespace bulkhead::worker::test {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t gpu_features = wire::feature_cuda_vmm | wire::feature_returning;

/// The methods of the fake model that have an input: each gives it back, by the driver's copies.
class EchoOnGpu final : public FakeModel {
public:
    EchoOnGpu(std::shared_ptr<ModelLog> log, std::unique_ptr<GpuEcho> echo)
        : FakeModel{log}, log_{std::move(log)}, echo_{std::move(echo)} {}
    [[nodiscard]] std::shared_ptr<const cuda::Gpu> gpu() const override { return echo_->gpu(); }
    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>&, OutputSink& sink) override {
        if (method.name == "wait") log_->gate.pass();
        return echo_->run(method, inputs, sink);
    }

private:
    std::shared_ptr<ModelLog> log_;
    std::unique_ptr<GpuEcho> echo_;
};

class GpuMessages : public DeathTest {
protected:
    void SetUp() override {
        auto opened = cuda::Gpu::open(0);
        if (!opened) GTEST_SKIP() << opened.error().text();
        gpu = *opened;
        if ((gpu->features() & wire::feature_cuda_vmm) == 0) GTEST_SKIP() << "this GPU shares no memory by descriptor";
        spec.channel.bytes_max = 64u << 20;
        load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
            auto echo = GpuEcho::open();
            if (!echo) return std::move(echo).error();
            return std::unique_ptr<Model>{std::make_unique<EchoOnGpu>(log, std::move(*echo))};
        };
        start_ready();
    }

    static void ask_for_slab(TestClient& client, std::uint64_t request_id, wire::SlabDirection direction) {
        client.send(channel::encode(
            channel::SlabRequest{request_id, direction, wire::SlabKind::cuda_vmm, std::uint64_t{2} << 20}));
    }
    /// The slab that was asked for; before the first one come the events.
    void take_slab(TestClient& client) {
        for (;;) {
            const auto message = client.receive();
            ASSERT_TRUE(message);
            if (const auto* event = std::get_if<channel::EventOffer>(&*message)) {
                (event->from_worker ? workers_event : own_event) = event->event_id;
                if (!event->from_worker) own_handle = event->handle;
                continue;
            }
            ASSERT_TRUE(std::holds_alternative<channel::SlabOffer>(*message));
            const auto& offer = std::get<channel::SlabOffer>(*message);
            ASSERT_EQ(offer.kind, wire::SlabKind::cuda_vmm);
            if (offer.direction == wire::SlabDirection::input) input_slab = offer.slab_id;
            return;
        }
    }
    [[nodiscard]] channel::Tensor input(std::uint32_t event_id) const {
        channel::Tensor tensor{"x", wire::DType::float32, {4}, {input_slab, 0, 0, 4 * sizeof(float), 1}};
        tensor.event_id = event_id;
        return tensor;
    }

    std::shared_ptr<const cuda::Gpu> gpu;
    // Of the client that was last offered one
    std::uint32_t own_event = 0;
    wire::CudaIpcHandle own_handle{};
    std::uint32_t workers_event = 0;
    std::uint32_t input_slab = 0;
};

TEST_F(GpuMessages, AnEventThatIsNotTheClientsIsRefusedWithWhatNamesIt) {
    TestClient neighbour = open_channel();
    TestClient client = introduce();
    client.open(gpu_features, gpu->uuid());
    std::uint64_t request = 0;
    for (const auto direction : {wire::SlabDirection::input, wire::SlabDirection::output}) {
        ask_for_slab(client, ++request, direction);
        take_slab(client);
        if (HasFatalFailure()) return;
    }

    for (const std::uint32_t wrong : {std::uint32_t{77}, std::numeric_limits<std::uint32_t>::max(), workers_event}) {
        SCOPED_TRACE(wrong);
        client.infer(++request, "echo", {input(wrong)});
        EXPECT_THAT(client.expect_error(request, ErrorCode::protocol_violation).attempt, HasSubstr("event"));

        client.infer(++request, "echo", {input(0)});
        const channel::InferResult result = client.expect_result(request);
        ASSERT_EQ(result.tensors.size(), 1U);
        EXPECT_NE(result.tensors[0].event_id, 0U) << "it lies on the GPU";
        wire::LeaseRef lease = result.tensors[0].lease;
        lease.event_id = wrong;
        release(client, lease);
        EXPECT_THAT(client.expect_error(0, ErrorCode::protocol_violation).attempt, HasSubstr("event"));
        lease.event_id = own_event;
        release(client, lease);  // it is leased still

        neighbour.infer(request, "echo", {neighbour.tensor({5})});
        EXPECT_EQ(neighbour.values(neighbour.expect_result(request).tensors.at(0)), (std::vector<float>{5}));
    }
    client.infer(++request, "echo", {input(own_event)});  // and nothing was said about the releases
    client.expect_result(request);
}

TEST_F(GpuMessages, DeathBetweenAnyTwoStepsLeavesNothingOnTheGpu) {
    wire::LeaseRef held{};
    int arrivals = 0;
    std::vector<Step> steps = opening(gpu_features, gpu->uuid());
    const std::vector<Step> after{
        {"a request for a slab", [](TestClient& client) { ask_for_slab(client, 1, wire::SlabDirection::input); }},
        {"the events and the slab", [this](TestClient& client) { take_slab(client); }},
        {"a request for one of results",
         [](TestClient& client) { ask_for_slab(client, 2, wire::SlabDirection::output); }},
        {"that slab", [this](TestClient& client) { take_slab(client); }},
        {"a request that runs, behind an event",
         [&](TestClient& client) {
             client.infer(3, "wait", {input(own_event)});
             log->gate.await_arrivals(++arrivals);
         },
         true},
        {"the return of its slab, meanwhile", [this](TestClient& client) { return_slab(client, input_slab); }, true},
        {"its end", [this](TestClient&) { log->gate.let_one_pass(); }},
        {"its result", [&](TestClient& client) { held = client.expect_result(3).tensors.at(0).lease; }},
        {"the lease given back, behind an event",
         [&](TestClient& client) {
             held.event_id = own_event;
             release(client, held);
         }},
        {"the return of the results' slab", [&](TestClient& client) { return_slab(client, held.slab_id); }},
    };
    steps.insert(steps.end(), after.begin(), after.end());
    // The driver keeps what it needs once: it is there before anything is counted.
    {
        TestClient first = introduce();
        for (const Step& step : steps) step.take(first);
        first.close();
        EXPECT_EQ(number(expect_said("channel_closed"), "channel"), first.id);
    }
    die_after_each(steps);
}

TEST_F(GpuMessages, AResultsSlabIsReturnedWhileAResultLiesInIt) {
    TestClient client = introduce();
    client.open(gpu_features, gpu->uuid());
    for (const auto direction : {wire::SlabDirection::input, wire::SlabDirection::output}) {
        ask_for_slab(client, 1, direction);
        take_slab(client);
        if (HasFatalFailure()) return;
    }
    client.infer(2, "echo", {input(0)});
    const wire::LeaseRef held = client.expect_result(2).tensors.at(0).lease;
    constexpr std::uint64_t on_host = 128 << 10, each = 2 << 20;

    return_slab(client, held.slab_id);

    client.infer(3, "echo", {input(0)});
    EXPECT_EQ(client.expect_result(3).tensors.at(0).event_id, 0U) << "it lies on the GPU";
    await_slab_bytes(on_host + 2 * each);
    release(client, held);
    await_slab_bytes(on_host + each);
}

/// The worker's stream waits for a client that lives and stalls. What another client then asks for
/// waits for the GPU.
class GpuBehindAStalledClient : public GpuMessages {
protected:
    GpuBehindAStalledClient() {
        spec.deadlines.request = 50ms;
        page = StatusPage::make().value();
    }
    void SetUp() override {
        GpuMessages::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        other = open_with_slab();
        others_slab = input_slab;
        stalled = open_with_slab();
        ask_for_slab(*stalled, 2, wire::SlabDirection::output);
        take_slab(*stalled);
        ASSERT_EQ(its_gpu.ask("event import " + bulkhead::test::to_text(own_handle)), "ok");
        ASSERT_EQ(its_gpu.ask("stream block"), "ok");
        ASSERT_EQ(its_gpu.ask("event record"), "ok");
        stalled->infer(3, "echo", {input(own_event)});
        stalled->expect_result(3);
    }
    void TearDown() override {
        its_gpu.ask("stream unblock");
        its_gpu.ask("stream synchronize");  // what it recorded is reached before it ends
    }

    std::optional<TestClient> open_with_slab() {
        std::optional<TestClient> client{introduce()};
        client->open(gpu_features | wire::feature_cuda_ipc, gpu->uuid());
        ask_for_slab(*client, 1, wire::SlabDirection::input);
        take_slab(*client);
        return client;
    }
    void expect_ends_itself(const std::string& while_it) {
        EXPECT_EQ(expect_exit(), 1);
        EXPECT_THAT(page_seen(page->fd()).request.data(), testing::StartsWith(while_it));
    }

    bulkhead::test::CudaPeer its_gpu;
    std::optional<TestClient> stalled;
    std::optional<TestClient> other;
    std::uint32_t others_slab = 0;
};

TEST_F(GpuBehindAStalledClient, AChannelThatEndsEndsTheWorkerAfterARequestsDeadline) {
    other->close();
    expect_ends_itself("freeing slabs of channel");
}

TEST_F(GpuBehindAStalledClient, ASlabThatIsReturnedEndsTheWorkerAfterARequestsDeadline) {
    return_slab(*other, others_slab);
    expect_ends_itself("freeing slabs of channel");
}

TEST_F(GpuBehindAStalledClient, ASlabThatTheDriverMakesLateEndsTheWorkerAfterARequestsDeadline) {
    if (!bulkhead::test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver waits there for sure";
    other->send(channel::encode(
        channel::SlabRequest{2, wire::SlabDirection::input, wire::SlabKind::cuda_ipc, std::uint64_t{2} << 20}));
    expect_ends_itself("making a slab of channel");
}

/// Of a worker whose memory on the GPU the client cannot import.
template <typename C>
class RefusedGpuSlabs : public bulkhead::test::OnGpu {};
TYPED_TEST_SUITE(RefusedGpuSlabs, bulkhead::test::BothClients, bulkhead::test::ClientNames);

TYPED_TEST(RefusedGpuSlabs, FailTheRequestsWhoseResultsLieInThemAndNoOther) {
    if (!bulkhead::test::is_fake_cuda()) GTEST_SKIP() << "no GPU has told yet what it says to such memory";
    for (const bool opens_events : {true, false}) {
        SCOPED_TRACE(opens_events ? "the slab" : "the events before it");
        bulkhead::test::FakeWorker worker{[&](bulkhead::test::FakeWorker& self) {
            const auto offer = [&self](std::uint32_t id, std::uint64_t request_id) {
                const auto direction = wire::SlabDirection::output;
                const HostSlab slab = HostSlab::create(self.slab_bytes, direction, "of no GPU").value();
                const std::array<int, 1> fds{slab.fd()};
                self.send(channel::encode(
                              channel::SlabOffer{request_id, id, direction, wire::SlabKind::cuda_vmm, self.slab_bytes}),
                          fds);
            };
            const auto answer = [&self](std::uint64_t request_id, std::uint32_t slab_id) {
                channel::Tensor tensor{"y", wire::DType::float32, {4}, {slab_id, 0, 0, 4 * sizeof(float), 1}};
                tensor.event_id = 1;
                self.answer(request_id, {tensor});
            };
            const auto expect_let_go = [&self](std::uint32_t slab_id) {
                const auto release = self.expect<channel::Release>();
                EXPECT_THAT(release.leases, testing::ElementsAre(testing::Field(&wire::LeaseRef::slab_id, slab_id)));
            };
            self.welcome.features = gpu_features;
            self.greet();
            std::array<std::uint64_t, 3> requests{};
            for (std::uint64_t& request : requests) request = self.expect<channel::Infer>().request_id;
            const std::uint64_t asked = self.expect<channel::SlabRequest>().request_id;
            if (!opens_events) self.send(channel::encode(channel::EventOffer{1, true, {}}));
            offer(2, asked);
            answer(requests[0], 2);
            offer(3, 0);  // the first has no room for the next result
            answer(requests[1], 3);
            EXPECT_EQ(self.expect<channel::SlabReturn>().slab_id, 2U);
            expect_let_go(2);
            EXPECT_EQ(self.expect<channel::SlabReturn>().slab_id, 3U);
            expect_let_go(3);
            self.answer(requests[2], {self.output("y", {5})});
            self.answer(self.expect<channel::Infer>().request_id, {self.output("y", {6})});
        }};
        ChannelOptions options;
        options.gpu = this->gpu;
        auto channel = TypeParam::adopt(worker.client_end(), options);
        ASSERT_TRUE(channel) << channel.error().text();
        std::array<std::uint64_t, 3> requests{};
        for (std::uint64_t& request : requests) request = channel->submit({}).value();

        EXPECT_TRUE(channel->keep_outputs_on_gpu(4096));

        for (const std::uint64_t lost : {requests[0], requests[1]}) {
            const Result<Reply> reply = channel->wait(lost);
            ASSERT_FALSE(reply);
            EXPECT_EQ(reply.error().code, channel->why_no_gpu()->code) << reply.error().text();
            EXPECT_THAT(reply.error().attempt, HasSubstr(channel->why_no_gpu()->attempt));
        }
        for (const auto& reply : {channel->wait(requests[2]), channel->infer({})})
            EXPECT_TRUE(reply) << reply.error().text();
    }
}

/// Of a worker that the client cannot believe.
class GpuEventOffers : public bulkhead::test::OnGpu {
protected:
    /// After the offers of a worker that agreed to these features.
    void expect_broken_off(std::uint64_t features, const std::vector<std::vector<std::byte>>& offers) {
        bulkhead::test::FakeWorker worker{[&](bulkhead::test::FakeWorker& self) {
            self.welcome.features = features;
            self.greet();
            for (const auto& offer : offers) self.send(offer);
            self.await_hang_up();
        }};
        ChannelOptions options;
        options.gpu = gpu;
        auto channel = Channel::adopt(worker.client_end(), options).value();
        const auto reply = channel.infer({});
        ASSERT_FALSE(reply);
        EXPECT_EQ(reply.error().code, ErrorCode::protocol_violation) << reply.error().text();
        EXPECT_THAT(reply.error().attempt, HasSubstr("event"));
    }
    std::vector<std::byte> offer(std::uint32_t event_id, std::uint16_t from_worker = 1) {
        std::vector<std::byte> packet = channel::encode(channel::EventOffer{event_id, false, handle});
        std::memcpy(packet.data() + sizeof(wire::Header) + offsetof(wire::EventOffer, from_worker), &from_worker,
                    sizeof from_worker);
        return packet;
    }

    bulkhead::test::CudaPeer exporter;  // an event is opened in other processes alone
    wire::CudaIpcHandle handle = [this] {
        const std::string made = exporter.ask("event create");
        return made.starts_with("ok ") ? bulkhead::test::handle_from(made.substr(3)) : wire::CudaIpcHandle{};
    }();
};

TEST_F(GpuEventOffers, ThatAreWrongEndTheChannel) {
    const struct {
        const char* what;
        std::uint64_t features;
        std::vector<std::vector<std::byte>> offers;
    } all[] = {{"not agreed", wire::feature_returning, {offer(1)}},
               {"without a number", gpu_features, {offer(0)}},
               {"of no direction", gpu_features, {offer(1, 2)}},
               {"twice", gpu_features, {offer(1), offer(1)}},
               {"for both directions", gpu_features, {offer(1, 0), offer(1, 1)}}};
    for (const auto& [what, features, offers] : all) {
        SCOPED_TRACE(what);
        expect_broken_off(features, offers);
    }
    if (bulkhead::test::is_fake_cuda()) {  // no GPU has told yet whether it opens one
                                           // event so often
        SCOPED_TRACE("too many");
        std::vector<std::vector<std::byte>> offers;
        for (std::uint32_t id = 1; id <= bulkhead::limits::gpu_events_max + 1; ++id)
            offers.push_back(offer(id, static_cast<std::uint16_t>(id % 2)));
        expect_broken_off(gpu_features, offers);
    }
}

}  // namespace
}  // namespace bulkhead::worker::test
