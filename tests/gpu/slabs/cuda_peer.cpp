#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <variant>

#include <fmt/format.h>

#include "bulkhead/channel.h"
#include "ipc/base/packet.h"
#include "ipc/cuda/interprocess_event.h"
#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/on_gpu.h"

extern char** environ;

namespace bulkhead::test {
namespace {

constexpr int peer_fd = 3;
constexpr int patience_ms = 60'000;

class Commands {
public:
    explicit Commands(std::shared_ptr<const cuda::Gpu> gpu) : gpu_{std::move(gpu)}, driver_{gpu_->driver()} {
        const cuda::Gpu::Current current{*gpu_};
        check("cuStreamCreate", driver_.cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING));
    }

    std::string run(const std::string& command, UniqueFd fd, UniqueFd& answer_fd) {
        std::istringstream words{command};
        std::string subject, verb, last;
        words >> subject >> verb;
        std::uint64_t number = 0;
        if (subject == "vmm") {
            words >> number >> last;
            return verb == "create"
                       ? create_vmm(number, answer_fd)
                       : keep(cuda::VmmSlab::import(gpu_, fd.get(), number,
                                                    last == "ro" ? cuda::Access::read_only : cuda::Access::read_write));
        }
        if (subject == "legacy") {
            words >> number >> last;
            return verb == "create" ? create_legacy(number)
                                    : keep(cuda::LegacySlab::import(gpu_, handle_from(last), number));
        }
        if (subject == "drop") {
            slab_ = {};
            return "ok";
        }
        if (subject == "event") {
            words >> last;
            return event(verb, last);
        }
        if (subject == "stream") return stream(verb);
        if (subject == "channel") return hold_channel(command.substr(command.rfind(' ') + 1), verb == "hold");
        number = std::stoull(verb);
        unsigned byte = 0;
        words >> byte;
        return access(subject, number, static_cast<unsigned char>(byte));
    }

private:
    template <typename Slab>
    std::string keep(Result<Slab> slab) {
        if (!slab) return slab.error().text();
        pointer_ = slab->pointer();
        slab_ = std::move(*slab);
        return "ok";
    }
    std::string create_vmm(std::uint64_t size, UniqueFd& answer_fd) {
        Result<cuda::VmmSlab> slab = cuda::VmmSlab::create(gpu_, size);
        if (!slab) return slab.error().text();
        Result<UniqueFd> exported = slab->export_fd();
        if (!exported) return exported.error().text();
        answer_fd = std::move(*exported);
        return keep(std::move(slab));
    }
    std::string create_legacy(std::uint64_t size) {
        Result<cuda::LegacySlab> slab = cuda::LegacySlab::create(gpu_, size);
        if (!slab) return slab.error().text();
        const Result<wire::CudaIpcHandle> handle = slab->handle();
        if (!handle) return handle.error().text();
        return keep(std::move(slab)) + " " + to_text(*handle);
    }
    std::string event(const std::string& verb, const std::string& handle_text) {
        if (verb == "create" || verb == "import") {
            auto made = verb == "create" ? cuda::InterprocessEvent::create(gpu_)
                                         : cuda::InterprocessEvent::import(gpu_, handle_from(handle_text));
            if (!made) return made.error().text();
            event_.emplace(std::move(*made));
            if (verb == "import") return "ok";
            const auto handle = event_->handle();
            return handle ? "ok " + to_text(*handle) : handle.error().text();
        }
        const Result<> done = verb == "record" ? event_->record(stream_) : event_->make_wait(stream_);
        return done ? "ok" : done.error().text();
    }
    std::string stream(const std::string& verb) {
        const cuda::Gpu::Current current{*gpu_};
        if (verb == "block") return check("cuLaunchHostFunc", gate_.hold(*gpu_, stream_));
        if (verb == "stamp") return check("cuLaunchHostFunc", driver_.cuLaunchHostFunc(stream_, Stamp::take, &stamp_));
        if (verb == "synchronize" || verb == "stamped") {
            const std::string done = check("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
            return verb == "stamped" && done == "ok" ? fmt::format("ok {}", stamp_.ns) : done;
        }
        gate_.let_pass();
        return "ok";
    }
    std::string hold_channel(const std::string& model, bool waits) {
        Result<ControlClient> control = ControlClient::connect(std::getenv("BULKHEAD_TEST_SOCKET"));
        if (!control) return control.error().text();
        ChannelOptions options;
        options.gpu = gpu_;
        Result<Channel> opened = Channel::open(*control, model, options);
        if (!opened) return opened.error().text();
        channel_.emplace(std::move(*opened));
        const std::array<std::int64_t, 1> dims{256};
        Result<Input> input = channel_->allocate_on_gpu(wire::DType::float32, dims);
        if (!input) return input.error().text();
        if (!input->gpu()) return channel_->why_no_gpu()->text();
        if (Result<> kept = channel_->keep_outputs_on_gpu(1024); !kept) return kept.error().text();
        input_.emplace(std::move(*input));
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &*input_}};
        Request request;
        request.inputs = inputs;
        request.stream = stream_;
        if (!waits) {
            const Result<std::uint64_t> sent = channel_->submit(request);
            return sent ? "ok" : sent.error().text();
        }
        Result<Reply> reply = channel_->infer(request);
        if (!reply) return reply.error().text();
        reply_.emplace(std::move(*reply));
        return "ok";
    }
    std::string access(const std::string& verb, std::uint64_t offset, unsigned char byte) {
        const cuda::Gpu::Current current{*gpu_};
        queued_ = byte;
        const auto host = reinterpret_cast<cuda::CUdeviceptr>(&queued_);
        const auto place = pointer_ + offset;
        const bool reads = verb == "read";
        // Not by a copy of this byte: one from pageable memory may wait for the stream.
        const std::string copied = reads ? check("cuMemcpyAsync", driver_.cuMemcpyAsync(host, place, 1, stream_))
                                         : check("cuMemsetD8Async", driver_.cuMemsetD8Async(place, byte, 1, stream_));
        if (copied != "ok" || verb == "fill") return copied;
        const std::string done = check("cuStreamSynchronize", driver_.cuStreamSynchronize(stream_));
        return reads && done == "ok" ? fmt::format("ok {}", queued_) : done;
    }
    std::string check(std::string_view call, cuda::CUresult result) {
        const Result<> done = driver_.check(call, result);
        return done ? "ok" : done.error().text();
    }

    std::shared_ptr<const cuda::Gpu> gpu_;
    const cuda::Driver& driver_;
    cuda::CUstream stream_ = nullptr;
    std::variant<std::monostate, cuda::VmmSlab, cuda::LegacySlab> slab_;
    cuda::CUdeviceptr pointer_ = 0;
    std::optional<cuda::InterprocessEvent> event_;
    StreamGate gate_;
    Stamp stamp_;
    std::optional<Channel> channel_;
    std::optional<Input> input_;
    std::optional<Reply> reply_;
    unsigned char queued_ = 0;  ///< what a queued copy still reads
};

bool wait_readable(int fd, int timeout_ms) {
    pollfd ready{fd, POLLIN, 0};
    return ::poll(&ready, 1, timeout_ms) > 0;
}

}  // namespace

CudaPeer::CudaPeer(const std::map<std::string, std::string>& environment) {
    PacketPair pair = PacketPair::make().value();
    std::map<std::string, std::string> merged;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        const std::string text = *entry;
        merged[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    for (const auto& [name, value] : environment) merged[name] = value;
    std::vector<std::string> lines;
    for (const auto& [name, value] : merged) lines.push_back(name + "=" + value);
    std::vector<char*> env;
    for (std::string& line : lines) env.push_back(line.data());
    env.push_back(nullptr);
    std::string program = "/proc/self/exe", option = "--cuda-peer";
    std::array<char*, 3> arguments{program.data(), option.data(), nullptr};
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, pair.second.get(), peer_fd);
    const int error = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments.data(), env.data());
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw std::runtime_error{"posix_spawn"};
    socket_ = std::move(pair.first);
}

CudaPeer::~CudaPeer() { kill(); }

void CudaPeer::kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
}

std::string CudaPeer::ask(const std::string& command, int fd) {
    const std::span<const int> fds = fd < 0 ? std::span<const int>{} : std::span{&fd, 1};
    if (const auto sent = send_packet(socket_.get(), command, fds); !sent) return sent.error().text();
    if (!wait_readable(socket_.get(), patience_ms)) return "no answer";
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    const auto received = receive_packet(socket_.get(), buffer, packet);
    if (!received || *received != ReceiveOutcome::packet) return "the peer is gone";
    if (!packet.fds.empty()) fd_ = std::move(packet.fds.front());
    return {reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
}

int CudaPeer::run() {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::vector<std::byte> buffer(packet_bytes_max);
    auto gpu = cuda::Gpu::open(0);
    std::optional<Commands> commands;
    if (gpu) commands.emplace(*gpu);
    while (wait_readable(peer_fd, -1)) {
        Packet packet;
        const auto received = receive_packet(peer_fd, buffer, packet);
        if (!received || *received == ReceiveOutcome::closed) return 0;
        const std::string command{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
        UniqueFd answer_fd;
        const std::string answer =
            commands
                ? commands->run(command, packet.fds.empty() ? UniqueFd{} : std::move(packet.fds.front()), answer_fd)
                : gpu.error().text();
        const int fd = answer_fd.get();
        if (!send_packet(peer_fd, answer, fd < 0 ? std::span<const int>{} : std::span{&fd, 1})) return 1;
    }
    return 0;
}

std::string to_text(const wire::CudaIpcHandle& handle) {
    std::string text;
    for (const std::byte byte : handle) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
    return text;
}

wire::CudaIpcHandle handle_from(const std::string& text) {
    wire::CudaIpcHandle handle{};
    for (std::size_t i = 0; i < handle.size() && 2 * i + 1 < text.size(); ++i)
        handle[i] = static_cast<std::byte>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
    return handle;
}

}  // namespace bulkhead::test
