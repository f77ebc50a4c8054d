#pragma once

/// A worker's event loop in a thread of the test, with a fake model, spoken to over real sockets:
/// the test holds the daemon's end of the link and the clients' ends of the channels.

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>
#include <gtest/gtest.h>

#include "config/fleet_json.h"
#include "ipc/base/packet.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/host_slab.h"
#include "tests/support/transport_end.h"
#include "worker/server/server.h"

namespace bulkhead::worker::test {

using namespace std::chrono_literals;

/// What no wait of a test exceeds: reaching it is the failure of the test.
inline constexpr std::chrono::milliseconds patience = 20s;

/// Where a fake inference, or a fake load, waits until the test lets it go on.
class Gate {
public:
    void pass() {
        std::unique_lock lock{mutex_};
        ++arrived_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return open_ || passes_ > 0; });
        if (!open_) --passes_;
    }
    /// Waits until `count` have arrived in all.
    void await_arrivals(int count) {
        std::unique_lock lock{mutex_};
        ASSERT_TRUE(changed_.wait_for(lock, patience, [&] { return arrived_ >= count; })) << "nobody came to the gate";
    }
    void let_one_pass() {
        const std::lock_guard lock{mutex_};
        ++passes_;
        changed_.notify_all();
    }
    void open() {
        const std::lock_guard lock{mutex_};
        open_ = true;
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int arrived_ = 0;
    int passes_ = 0;
    bool open_ = false;
};

/// What the test sees of a fake model from its own thread, and sets before the load.
struct ModelLog {
    std::mutex mutex;
    std::vector<std::string> runs;  ///< "echo" with the first element, in the order of execution
    int resets = 0;
    int registered = 0;
    int unregistered = 0;
    std::optional<Error> reset_error;
    Gate gate;  ///< of the method "wait"
    std::function<Result<>(const std::string& method)> before_run;  ///< its error ends the run
    bool writes_inputs = false;

    std::vector<std::string> runs_so_far() {
        const std::lock_guard lock{mutex};
        return runs;
    }
};

/// Methods: echo (x → y), wait (x → y, after the gate), fill (bytes → y of so many), fail
/// (allocates, then errs).
class FakeModel : public Model {
public:
    explicit FakeModel(std::shared_ptr<ModelLog> log) : log_{std::move(log)} {
        const config::TensorSpec x{"x", wire::DType::float32, {{0, 1 << 24}}};
        const config::TensorSpec y{"y", wire::DType::float32, {{0, 1 << 24}}};
        for (const char* name : {"echo", "wait", "fail"}) {
            config::MethodSpec method;
            method.name = name;
            method.inputs = {x};
            method.outputs = {y};
            methods_.push_back(method);
        }
        config::MethodSpec fill;
        fill.name = "fill";
        fill.parameters = {{"bytes", config::ParameterType::integer, std::nullopt}};
        fill.outputs = {{"y", wire::DType::uint8, {{0, 1 << 30}}}};
        methods_.push_back(fill);
    }

    const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }

    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& parameters, OutputSink& sink) override {
        if (log_->before_run)
            if (Result<> hooked = log_->before_run(method.name); !hooked) return hooked;
        note(method, inputs);
        if (method.name == "wait") log_->gate.pass();
        if (method.name == "fill") {
            const std::int64_t bytes = std::get<std::int64_t>(parameters.at(0));
            auto room = sink.allocate("y", wire::DType::uint8, std::span{&bytes, 1});
            if (!room) return room.error();
            std::memset(room->data(), 0x5a, room->size());
            return {};
        }
        auto room = sink.allocate("y", inputs[0].dtype, inputs[0].dims);
        if (!room) return room.error();
        if (method.name == "fail") return Error{ErrorCode::inference_failed, "half way", {}};
        std::ranges::copy(inputs[0].bytes, room->begin());
        return {};
    }

    Result<> reset() override {
        const std::lock_guard lock{log_->mutex};
        ++log_->resets;
        if (log_->reset_error) return *log_->reset_error;
        return {};
    }
    void register_host_memory(std::span<std::byte>) override {
        const std::lock_guard lock{log_->mutex};
        ++log_->registered;
    }
    void unregister_host_memory(std::span<std::byte>) noexcept override {
        const std::lock_guard lock{log_->mutex};
        ++log_->unregistered;
    }
    bool writes_inputs() const noexcept override { return log_->writes_inputs; }
    boost::json::object graphs() const override { return {{"mode", "off"}}; }
    std::string device_name() const override { return "cpu"; }

private:
    void note(const config::MethodSpec& method, std::span<const TensorView> inputs) {
        std::string line = method.name;
        if (!inputs.empty() && inputs[0].bytes.size() >= sizeof(float)) {
            float first = 0;
            std::memcpy(&first, inputs[0].bytes.data(), sizeof first);
            line += " " + std::to_string(static_cast<int>(first));
        }
        const std::lock_guard lock{log_->mutex};
        log_->runs.push_back(line);
    }

    std::shared_ptr<ModelLog> log_;
    std::vector<config::MethodSpec> methods_;
};

inline bool readable_within(int fd, std::chrono::milliseconds time) {
    pollfd entry{fd, POLLIN, 0};
    return ::poll(&entry, 1, static_cast<int>(time.count())) > 0;
}

inline pid_t own_thread() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

/// A thread of any process.
inline bool sleeps(pid_t thread) {
    std::ifstream status{"/proc/" + std::to_string(thread) + "/status"};
    for (std::string line; std::getline(status, line);)
        if (line.starts_with("State:")) return line.find('S', 6) != std::string::npos;
    return false;
}

inline std::uint64_t number(const boost::json::object& message, std::string_view key) {
    return message.at(key).to_number<std::uint64_t>();
}

/// A client of one channel, speaking the wire by hand.
class TestClient {
public:
    TestClient(UniqueFd socket, std::uint64_t channel_id)
        : id{channel_id}, end_{std::make_unique<bulkhead::test::TransportEnd>(std::move(socket))} {}

    /// Hello, welcome, rings where the tests run over them, and the two slabs.
    void open(std::uint64_t features = 0, const wire::GpuUuid& gpu = {}) {
        if (bulkhead::test::over_rings()) features |= wire::feature_rings;
        send(channel::encode(channel::Hello{features, "test", gpu}));
        auto answer = receive();
        ASSERT_TRUE(answer) << "the worker closed the channel";
        ASSERT_TRUE(std::holds_alternative<channel::Welcome>(*answer)) << error_of(*answer).text();
        welcome = std::get<channel::Welcome>(*answer);
        if (bulkhead::test::over_rings()) {
            ASSERT_EQ(welcome.features & wire::feature_rings, wire::feature_rings);
            accept_rings();
        }
        for (int i = 0; i < welcome.slab_count; ++i) {
            answer = receive();
            ASSERT_TRUE(answer && std::holds_alternative<channel::SlabOffer>(*answer));
        }
        ASSERT_TRUE(find_slab(wire::SlabDirection::input) != nullptr);
        ASSERT_TRUE(find_slab(wire::SlabDirection::output) != nullptr);
    }

    /// Right after a welcome that agreed to them.
    void accept_rings() { end_->accept_rings(); }

    /// Waits while the socket is full.
    void send(std::span<const std::byte> bytes) { ASSERT_TRUE(end_->send_patiently(bytes)); }
    void send(std::span<const std::byte> bytes, int fd) { ASSERT_TRUE(end_->send_patiently(bytes, {&fd, 1})); }

    /// The next message; empty at the end of file. Slabs that it offers are mapped, but for
    /// those on a GPU.
    std::optional<channel::WorkerMessage> receive() {
        Packet packet;
        if (end_->receive(packet) != ReceiveOutcome::packet) return std::nullopt;
        auto message = channel::parse_from_worker(packet.bytes);
        if (!message) {
            ADD_FAILURE() << message.error().text();
            return std::nullopt;
        }
        const auto* offer = std::get_if<channel::SlabOffer>(&*message);
        if (offer != nullptr && offer->kind == wire::SlabKind::host_memfd) {
            EXPECT_EQ(packet.fds.size(), 1U);
            auto memory = HostSlab::adopt(std::move(packet.fds.at(0)), offer->size_bytes, offer->direction);
            EXPECT_TRUE(memory) << memory.error().text();
            slabs.push_back({*offer, std::move(*memory)});
        }
        return std::move(*message);
    }
    /// The next one that is not a slab_offer.
    std::optional<channel::WorkerMessage> receive_answer() {
        auto message = receive();
        while (message && std::holds_alternative<channel::SlabOffer>(*message)) message = receive();
        return message;
    }
    channel::InferResult expect_result(std::uint64_t request_id) {
        const auto message = receive_answer();
        if (!message || !std::holds_alternative<channel::InferResult>(*message)) {
            ADD_FAILURE() << "no result for " << request_id << ": "
                          << (message ? error_of(*message).text() : "end of file");
            return {};
        }
        const auto& result = std::get<channel::InferResult>(*message);
        EXPECT_EQ(result.request_id, request_id);
        return result;
    }
    Error expect_error(std::uint64_t request_id, ErrorCode code) {
        const auto message = receive_answer();
        if (!message || !std::holds_alternative<channel::Failure>(*message)) {
            ADD_FAILURE() << "no error for " << request_id;
            return {};
        }
        const auto& failure = std::get<channel::Failure>(*message);
        EXPECT_EQ(failure.request_id, request_id);
        EXPECT_EQ(to_string(failure.error.code), to_string(code)) << failure.error.text();
        return failure.error;
    }
    void expect_end() { EXPECT_FALSE(receive()) << "the channel is still open"; }
    [[nodiscard]] bool has_message() const { return readable_within(end_->socket(), 0ms); }
    /// Over rings: whether the worker has rung since the last wait, or the last call.
    [[nodiscard]] bool was_rung() { return end_->transport.has_rings() && end_->transport.sleep(0ms).value(); }

    /// These values at `offset` of the input slab.
    template <typename T>
    channel::Tensor tensor(std::string name, wire::DType dtype, std::span<const T> values, std::uint64_t offset,
                           std::uint64_t lease_id) {
        const auto& [offer, memory] = *find_slab(wire::SlabDirection::input);
        std::ranges::copy(std::as_bytes(values), memory.bytes().subspan(offset).begin());
        return {std::move(name),
                dtype,
                {static_cast<std::int64_t>(values.size())},
                {offer.slab_id, 0, offset, values.size_bytes(), lease_id}};
    }
    channel::Tensor tensor(const std::vector<float>& values, std::uint64_t offset = 0, std::uint64_t lease_id = 1) {
        return tensor<float>("x", wire::DType::float32, values, offset, lease_id);
    }
    void infer(std::uint64_t request_id, std::string_view method, channel::Tensors tensors,
               boost::json::object parameters = {}, std::chrono::milliseconds deadline = 0ms) {
        send(channel::encode(channel::Infer{request_id, std::string{method}, deadline, false, std::move(tensors),
                                            std::move(parameters)})
                 .value());
    }
    channel::InferResult echo(std::uint64_t request_id, float value = 1) {
        infer(request_id, "echo", {tensor({value})});
        return expect_result(request_id);
    }
    template <typename T = float>
    std::vector<T> values(const channel::Tensor& output) const {
        for (const auto& [offer, memory] : slabs)
            if (offer.slab_id == output.lease.slab_id) {
                std::vector<T> copy(output.lease.size_bytes / sizeof(T));
                const auto bytes = memory.bytes().subspan(output.lease.offset_bytes, output.lease.size_bytes);
                std::ranges::copy(bytes, std::as_writable_bytes(std::span{copy}).begin());
                return copy;
            }
        ADD_FAILURE() << "a result in slab " << output.lease.slab_id << ", which was never offered";
        return {};
    }
    void close() { end_->hang_up(); }

    struct Slab {
        channel::SlabOffer offer;
        HostSlab memory;
    };
    const Slab* find_slab(wire::SlabDirection direction) const {
        for (const Slab& slab : slabs)
            if (slab.offer.direction == direction) return &slab;
        return nullptr;
    }

    std::uint64_t id;  ///< of its channel
    channel::Welcome welcome;
    std::vector<Slab> slabs;

private:
    static Error error_of(const channel::WorkerMessage& message) {
        if (const auto* failure = std::get_if<channel::Failure>(&message)) return failure->error;
        return {ErrorCode::internal, "another kind of message", {}};
    }
    std::unique_ptr<bulkhead::test::TransportEnd> end_;
};

class LoopTest : public testing::Test {
protected:
    using Load = std::function<Result<std::unique_ptr<Model>>(const config::ModelSpec&, const LoadContext&)>;

    config::ModelSpec spec = [] {
        config::ModelSpec model;
        model.name = "fake";
        model.file = "/nonexistent/fake.pt";
        model.channel = {.input_bytes = 64 * 1024, .output_bytes = 64 * 1024, .bytes_max = 8u << 20, .channels_max = 8};
        model.log_level = config::LogLevel::error;
        return model;
    }();
    std::shared_ptr<ModelLog> log = std::make_shared<ModelLog>();
    Load load = loader<FakeModel>();
    std::chrono::milliseconds hello_deadline = patience;
    std::chrono::milliseconds unread_stream = patience;
    std::unique_ptr<StatusPage> page;  ///< as the test makes it
    std::optional<Server> server;
    boost::asio::io_context io;

    ~LoopTest() override { stop(); }

    template <typename M>
    Load loader() {
        return [this](const config::ModelSpec&, const LoadContext&) {
            return Result<std::unique_ptr<Model>>{std::make_unique<M>(log)};
        };
    }
    /// The load does this before the model is there.
    void load_after(std::function<void(const LoadContext&)> first) {
        load = [this, first = std::move(first)](const config::ModelSpec&, const LoadContext& context) {
            first(context);
            return Result<std::unique_ptr<Model>>{std::make_unique<FakeModel>(log)};
        };
    }
    void make_stateful() {
        spec.state = config::StateScope::channel;
        spec.reset_method = "reset_states";
    }
    /// Starts the worker; its hello is read.
    void start() {
        auto [daemon_end, worker_end] = PacketPair::make().value();
        link = std::move(daemon_end);
        server.emplace(io, std::move(worker_end),
                       ServerOptions{.identity = {"token", "fake", 2, 7},
                                     .cache = {},
                                     .load = load,
                                     .torch_version = "9.9",
                                     .page = page.get(),
                                     .hello_deadline = hello_deadline,
                                     .unread_stream = unread_stream,
                                     .exit = [this](int status) { exited(status); }});
        thread_ = std::thread{[this] { server->run(); }};
        hello = expect_said("hello");
    }
    void configure() {
        say({{"type", "configure"}, {"protocol", 1}, {"device", "cpu"}, {"model", config::to_json(spec)}});
    }
    void start_loading() {
        start();
        configure();
    }
    /// Up to and with `ready`.
    void start_ready() {
        start_loading();
        ready = expect_said("ready");
    }
    void stop() {
        log->gate.open();
        io.stop();
        if (thread_.joinable()) thread_.join();
        server.reset();
    }

    void say(const boost::json::object& message, int fd = -1) {
        const std::string text = boost::json::serialize(message);
        pollfd writable{link.get(), POLLOUT, 0};
        Result<> sent;
        do sent = send_packet(link.get(), text, {&fd, fd >= 0 ? 1U : 0U});
        while (!sent && sent.error().code == ErrorCode::queue_full &&
               ::poll(&writable, 1, static_cast<int>(patience.count())) > 0);
        ASSERT_TRUE(sent) << sent.error().text();
    }
    /// The next packet of this type on the link; others before it are passed over.
    boost::json::object expect_said(std::string_view type) {
        while (readable_within(link.get(), patience)) {
            Packet packet;
            const auto outcome = receive_packet(link.get(), buffer_, packet, 0, packet_fds_kernel_max);
            if (!outcome || *outcome != ReceiveOutcome::packet) break;
            brought = std::move(packet.fds);
            const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
            boost::json::object message = boost::json::parse(text).as_object();
            said.emplace_back(message.at("type").as_string());
            if (said.back() == type) return message;
        }
        ADD_FAILURE() << "the worker never said " << type;
        return {};
    }
    boost::json::object statistics() {
        say({{"type", "statistics_asked"}});
        return expect_said("statistics");
    }
    /// Asks until what is seen then has this value.
    void await(std::string_view what, std::uint64_t value,
               const std::function<std::uint64_t(const boost::json::object& statistics)>& seen) {
        std::uint64_t now = 0;
        for (const auto until = Clock::now() + patience; Clock::now() < until;) {
            const boost::json::object told = statistics();
            if (told.empty() || (now = seen(told)) == value) return;
        }
        ADD_FAILURE() << what << " is " << now << ", never " << value;
    }
    /// Until a counter has this value: what was sent on a channel has then been read.
    void await_statistics(std::string_view key, std::uint64_t value) {
        await(key, value, [key](const boost::json::object& told) { return number(told, key); });
    }
    int expect_exit() {
        std::unique_lock lock{exit_mutex_};
        EXPECT_TRUE(exit_changed_.wait_for(lock, patience, [this] { return exit_status_.has_value(); }));
        return exit_status_.value_or(-1);
    }

    /// A channel whose client has not spoken yet.
    TestClient introduce() {
        const std::uint64_t id = ++last_channel_;
        auto [client_end, worker_end] = PacketPair::make().value();
        say({{"type", "channel"}, {"channel", id}, {"client_pid", 1}, {"client_uid", 0}}, worker_end.get());
        return {std::move(client_end), id};
    }
    TestClient open_channel(std::uint64_t features = 0) {
        TestClient client = introduce();
        client.open(features);
        return client;
    }

    /// Of a worker that is started for it.
    TestClient first_channel(std::uint64_t features = 0) {
        start_ready();
        return open_channel(features);
    }

    UniqueFd link;
    boost::json::object hello;
    boost::json::object ready;
    std::vector<std::string> said;  ///< types, in order
    std::vector<UniqueFd> brought;  ///< descriptors of the last packet

private:
    void exited(int status) {
        io.stop();
        const std::lock_guard lock{exit_mutex_};
        exit_status_ = status;
        exit_changed_.notify_all();
    }

    std::thread thread_;
    std::vector<std::byte> buffer_ = std::vector<std::byte>(packet_bytes_max);
    std::uint64_t last_channel_ = 0;
    std::mutex exit_mutex_;
    std::condition_variable exit_changed_;
    std::optional<int> exit_status_;
};

}  // namespace bulkhead::worker::test
