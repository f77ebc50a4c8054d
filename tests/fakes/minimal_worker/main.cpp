/// A worker without LibTorch: the real event loop, and a model that gives its inputs back as its outputs. It starts in
/// milliseconds, so that thousands of its deaths can be measured and endured.
///
///   MINIMAL_BALLAST_BYTES  resident memory it fills at load
///   MINIMAL_RUN_MS         how long each request runs
///   MINIMAL_LOAD_STEPS     how many steps its load reports, a tenth of a second apart
///   MINIMAL_LOAD_HANGS     not empty: after those the load never ends
///   MINIMAL_STARTED        a file to which it appends a line when it is executed: CLOCK_MONOTONIC in ns, and its pid
///   MINIMAL_GPU_FILE, MINIMAL_GPU_BYTES, MINIMAL_CHILD   see mischief.h
///
/// `bulkhead-worker --stamp FILE` does only the last and then waits to be killed: a daemon for other supervisors.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "ipc/keeper_link.h"
#include "tests/fakes/minimal_worker/mischief.h"
#include "worker/fatal_signals.h"
#include "worker/limits.h"
#include "worker/model.h"
#include "worker/server.h"
#include "worker/status_page.h"

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

class Echo final : public Model {
public:
    explicit Echo(const config::ModelSpec& spec)
        : methods_{spec.methods}, run_for_{std::strtol(environment("MINIMAL_RUN_MS"), nullptr, 10)} {
        const auto bytes = std::strtoull(environment("MINIMAL_BALLAST_BYTES"), nullptr, 10);
        if (bytes > 0)
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    }

    [[nodiscard]] const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }
    Result<> run(const config::MethodSpec& method, std::span<const TensorView> inputs,
                 const std::vector<config::ParameterValue>& /*parameters*/, OutputSink& sink) override {
        if (run_for_ > 0) {
            fmt::print(stderr, "minimal: running\n");  // an event to wait for
            ::usleep(static_cast<useconds_t>(run_for_) * 1000);
        }
        for (std::size_t i = 0; i < std::min(inputs.size(), method.outputs.size()); ++i) {
            const auto room = sink.allocate(method.outputs[i].name, inputs[i].dtype, inputs[i].dims);
            if (!room) return room.error();
            std::memcpy(room->data(), inputs[i].bytes.data(), std::min(room->size(), inputs[i].bytes.size()));
        }
        return {};
    }
    Result<> reset() override { return {}; }
    void register_host_memory(std::span<std::byte> /*bytes*/) override {}
    void unregister_host_memory(std::span<std::byte> /*bytes*/) noexcept override {}
    [[nodiscard]] boost::json::object graphs() const override { return {{"mode", "off"}}; }
    [[nodiscard]] std::string device_name() const override { return "cpu"; }

private:
    std::vector<config::MethodSpec> methods_;
    long run_for_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc == 3 && std::string_view{argv[1]} == "--stamp") {
        stamp(argv[2]);
        while (true) ::pause();
    }
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
             if (context.cuda)
                 if (auto granted = context.wait_for_grant(0); !granted) return std::move(granted.error());
             if (auto taken = occupy_fake_gpu(); !taken) return std::move(taken.error());
             leave_a_child();
             return std::unique_ptr<Model>{std::make_unique<Echo>(spec)};
         },
         .torch_version = "none",
         .page = page ? page->release() : nullptr,
         .exit = [](int status) { ::_exit(status); }}};
    boost::asio::signal_set terminate{io, SIGTERM};
    terminate.async_wait([&](boost::system::error_code cancelled, int) {
        if (cancelled) return;
        terminate.clear();
        server.drain(limits::terminate_drain);
    });
    server.start();
    io.run();
    return 1;  // not reached: the server ends the process
}
