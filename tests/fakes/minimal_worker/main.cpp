/// A worker without LibTorch: the real event loop, and a model that gives its inputs back as its
/// outputs, or their first elements where an output's shape is declared with numbers alone. It
/// starts in milliseconds, so that thousands of its deaths can be measured and endured.
///
///   MINIMAL_BALLAST_BYTES  resident memory it fills at load
///   MINIMAL_RUN_MS         how long each request runs
///   MINIMAL_RUN_GATE       a FIFO: a request ends once somebody has it open for writing
///   MINIMAL_HELD           not empty: a request runs while the first float of its input is
///                          negative; its client writes another there. With an infinite one it runs
///                          out of memory. A generation stops after its first token while its
///                          prompt begins with 0
///   MINIMAL_LOAD_STEPS     how many steps its load reports, a tenth of a second apart
///   MINIMAL_LOAD_HANGS     not empty: after those the load never ends
///   MINIMAL_GENERATES      not empty: it generates too, by the tests' fake engine, each step as
///                          long as MINIMAL_RUN_MS
///   MINIMAL_CAPTURE        how many steps of a capture its load reports after that, unless
///                          graphs are off
///   MINIMAL_STARTED        a file to which it appends a line when it is executed: CLOCK_MONOTONIC
///                          in ns, and its pid
///   MINIMAL_GPU_FILE, MINIMAL_GPU_HELD_IN, MINIMAL_GPU_BYTES, MINIMAL_GPU_CONTEXT,
///   MINIMAL_CHILD          see mischief.h
///   MINIMAL_GPU_SLABS      not empty: it echoes on the GPU, see gpu_echo.h
///   MINIMAL_ENV_NAME       becomes NAME, which a fleet may not set: for what the fake driver reads
///   EVIL_LOAD, EVIL_RUN    what its load, and a request whose first float is positive, do:
///                          see misbehave.h
///
/// `bulkhead-worker --stamp FILE` does only the last and then waits to be killed: a daemon for
/// other supervisors.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "ipc/links/keeper_link.h"
#include "tests/fakes/minimal_worker/gpu_echo.h"
#include "tests/fakes/minimal_worker/mischief.h"
#include "tests/fakes/models/misbehave.h"
#include "tests/support/worker/fake_engine.h"
#include "worker/death/fatal_signals.h"
#include "worker/loop/handler_lock.h"
#include "worker/loop/limits.h"
#include "worker/loop/status_page.h"
#include "worker/model/model.h"
#include "worker/server/server.h"

using namespace bulkhead;
using namespace bulkhead::worker;

namespace {

constexpr int link_fd = keeper_link::child_link_fd;

const char* environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

void stamp(const char* file) {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    const std::string line = fmt::format("{} {}\n", now.tv_sec * 1'000'000'000LL + now.tv_nsec, ::getpid());
    const UniqueFd out{::open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)};
    if (out) (void)!::write(out.get(), line.data(), line.size());
}

/// `declared` is room for the answer: nothing is allocated while requests are served.
std::span<const std::int64_t> shape_of_answer(const config::TensorSpec& output, std::span<const std::int64_t> of_input,
                                              std::array<std::int64_t, wire::rank_max>& declared) {
    std::size_t rank = 0;
    for (const auto& dim : output.shape) {
        if (dim.min != dim.max) return of_input;
        declared[rank++] = dim.min;
    }
    return {declared.data(), rank};
}

void take_environment() {
    constexpr std::string_view prefix = "MINIMAL_ENV_";
    std::vector<std::string> entries;
    for (char** entry = environ; *entry != nullptr; ++entry)
        if (std::string_view{*entry}.starts_with(prefix)) entries.emplace_back(*entry + prefix.size());
    for (const std::string& entry : entries)
        ::setenv(entry.substr(0, entry.find('=')).c_str(), entry.substr(entry.find('=') + 1).c_str(), 1);
}

/// What EVIL_LOAD or EVIL_RUN says.
Result<> misbehave_as(const char* variable) {
    if (misbehave(environment(variable))) return {};
    return Error{ErrorCode::load_failed, "the evil model fails", {}};
}

float first_of(std::span<const TensorView> inputs) {
    float first = 0;
    if (inputs.empty() || inputs[0].bytes.size() < sizeof first) return 0;
    std::memcpy(&first, inputs[0].bytes.data(), sizeof first);
    return first;
}

/// Its second step lasts while the prompt begins with 0, where it is held.
class HeldEngine final : public test::FakeEngine {
public:
    HeldEngine(generation::Shape shape, bool is_held) : FakeEngine{std::move(shape)}, is_held_{is_held} {}

    Result<> prefill(std::uint32_t slot, const generation::Prompt& prompt, std::uint32_t first, std::uint32_t count,
                     bool last) override {
        prompt_ = prompt.inputs.front().bytes;
        steps_ = 0;
        return FakeEngine::prefill(slot, prompt, first, count, last);
    }
    Result<> launch(std::uint32_t n) override {
        if (++steps_ == 2)
            while (is_held_ && first_token() == 0) ::usleep(1000);
        return FakeEngine::launch(n);
    }

private:
    [[nodiscard]] std::int64_t first_token() const {
        std::int64_t token = 0;
        std::memcpy(&token, prompt_.data(), sizeof token);
        return token;
    }

    bool is_held_;
    std::span<const std::byte> prompt_{};
    std::uint64_t steps_ = 0;
};

class Echo final : public Model {
public:
    Echo(const config::ModelSpec& spec, std::unique_ptr<GpuEcho> gpu)
        : methods_{spec.methods}, gpu_{std::move(gpu)}, run_for_{std::strtol(environment("MINIMAL_RUN_MS"), nullptr, 10)} {
        const auto bytes = std::strtoull(environment("MINIMAL_BALLAST_BYTES"), nullptr, 10);
        if (bytes > 0)
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (*environment("MINIMAL_GENERATES") == '\0') return;
        generation::Shape shape = test::FakeEngine::usual();
        shape.length = 32768;
        shape.stop.clear();
        engine_ = std::make_unique<HeldEngine>(std::move(shape), is_held_);
        engine_->listens = false;
        engine_->at_launch = [this] { ::usleep(static_cast<useconds_t>(run_for_) * 1000); };
    }

    [[nodiscard]] const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }
    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& /*parameters*/, OutputSink& sink) override {
        if (run_for_ > 0) {
            fmt::print(stderr, "minimal: running\n");  // an event to wait for
            ::usleep(static_cast<useconds_t>(run_for_) * 1000);
        }
        if (const char* gate = environment("MINIMAL_RUN_GATE"); *gate != '\0')
            const UniqueFd opened{::open(gate, O_RDONLY | O_CLOEXEC)};
        while (is_held_ && first_of(inputs) < 0) ::usleep(1000);
        if (is_held_ && std::isinf(first_of(inputs))) throw std::bad_alloc{};
        if (gpu_) return gpu_->run(method, inputs, sink);
        if (is_evil_ && first_of(inputs) > 0)
            if (Result<> done = misbehave_as("EVIL_RUN"); !done) return done;
        for (std::size_t i = 0; i < std::min(inputs.size(), method.outputs.size()); ++i) {
            std::array<std::int64_t, wire::rank_max> declared{};
            const auto room = sink.allocate(method.outputs[i].name, inputs[i].dtype,
                                            shape_of_answer(method.outputs[i], inputs[i].dims, declared));
            if (!room) return room.error();
            std::memcpy(room->data(), inputs[i].bytes.data(), std::min(room->size(), inputs[i].bytes.size()));
        }
        return {};
    }
    Result<> reset() override { return {}; }
    generation::Engine* generator() noexcept override { return engine_.get(); }
    void register_host_memory(std::span<std::byte> /*bytes*/) override {}
    void unregister_host_memory(std::span<std::byte> /*bytes*/) noexcept override {}
    [[nodiscard]] std::shared_ptr<const bulkhead::cuda::Gpu> gpu() const override {
        return gpu_ ? gpu_->gpu() : nullptr;
    }
    [[nodiscard]] boost::json::object graphs() const override {
        return gpu_ ? gpu_->graphs() : boost::json::object{{"mode", "off"}};
    }
    [[nodiscard]] std::string device_name() const override { return "cpu"; }

private:
    std::vector<config::MethodSpec> methods_;
    std::unique_ptr<GpuEcho> gpu_;
    std::unique_ptr<HeldEngine> engine_;
    long run_for_;
    bool is_evil_ = *environment("EVIL_RUN") != '\0';
    bool is_held_ = *environment("MINIMAL_HELD") != '\0';
};

}  // namespace

int main(int argc, char** argv) {
    if (argc == 3 && std::string_view{argv[1]} == "--stamp") {
        stamp(argv[2]);
        while (true) ::pause();
    }
    take_environment();
    if (*environment("MINIMAL_STARTED") != '\0') stamp(environment("MINIMAL_STARTED"));
    Result<Identity> identity = Identity::parse(environment("BULKHEAD_WORKER"));
    if (!identity) {
        fmt::print(stderr, "{}\n", identity.error().text());
        return 2;
    }
    ::fcntl(link_fd, F_SETFD, FD_CLOEXEC);
    ::signal(SIGPIPE, SIG_IGN);
    spdlog::set_default_logger(spdlog::stderr_logger_mt("worker"));
    spdlog::set_pattern("%l: %v");
    const SignalStack signal_stack;
    report_fatal_signals(link_fd);
    Result<std::unique_ptr<StatusPage>> page = StatusPage::make();
    if (!page) spdlog::warn("{}", page.error().text());

    if (identity->is_blank() && *environment("CUDA_VISIBLE_DEVICES") != '\0')
        if (const Result<> made = occupy_context(); !made) return 1;

    boost::asio::io_context io{1};
    Server server{
        io,
        UniqueFd{link_fd},
        {.identity = std::move(*identity),
         .cache = environment("BULKHEAD_CACHE"),
         .load = [](const config::ModelSpec& spec, const LoadContext& context) -> Result<std::unique_ptr<Model>> {
             const auto steps = std::strtoull(environment("MINIMAL_LOAD_STEPS"), nullptr, 10);
             for (std::uint64_t step = 1; step <= steps; ++step) {
                 context.progress("loading", step, steps, "steps", "");
                 ::usleep(100'000);
             }
             while (*environment("MINIMAL_LOAD_HANGS") != '\0') ::pause();
             const auto captured =
                 spec.graphs != config::Graphs::off ? std::strtoull(environment("MINIMAL_CAPTURE"), nullptr, 10) : 0;
             for (std::uint64_t step = 1; step <= captured; ++step)
                 context.progress("capturing", step, captured, "steps", "");
             if (context.cuda)
                 if (auto granted = context.wait_for_grant(0); !granted) return std::move(granted.error());
             if (auto taken = occupy_fake_gpu(); !taken) return std::move(taken.error());
             leave_a_child();
             if (auto done = misbehave_as("EVIL_LOAD"); !done) return std::move(done.error());
             std::unique_ptr<GpuEcho> gpu;
             if (context.cuda && *environment("MINIMAL_GPU_SLABS") != '\0') {
                 Result<std::unique_ptr<GpuEcho>> opened = GpuEcho::open();
                 if (!opened) return std::move(opened).error();
                 gpu = std::move(*opened);
             }
             return std::unique_ptr<Model>{std::make_unique<Echo>(spec, std::move(gpu))};
         },
         .torch_version = "none",
         .page = page ? page->release() : nullptr,
         .exit = [](int status) { ::_exit(status); }}};
    boost::asio::signal_set terminate{io, SIGTERM};
    terminate.async_wait(HandlerLock::of(io).wrap([&](boost::system::error_code cancelled, int) {
        if (cancelled) return;
        terminate.clear();
        server.drain(limits::terminate_drain);
    }));
    server.run();
    return 1;  // not reached: the server ends the process
}
