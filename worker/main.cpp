#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "ipc/links/keeper_link.h"
#include "worker/death/exit_status.h"
#include "worker/death/fatal_signals.h"
#include "worker/loop/handler_lock.h"
#include "worker/loop/limits.h"
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

bool has_link() {
    int type = 0;
    socklen_t size = sizeof type;
    return ::getsockopt(link_fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

int wrong_usage(std::string_view why) {
    fmt::print(stderr,
               "bulkhead-worker: {}\nIt is started by bulkheadd, one process per model; what people start is "
               "`bulkhead up FLEET`.\n",
               why);
    return exit_usage;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 2 && std::string_view{argv[1]} == "--version") {
        fmt::print("bulkhead-worker {}, LibTorch {}\n", BULKHEAD_VERSION, torch_version());
        return 0;
    }
    if (argc > 1) return wrong_usage(fmt::format("unknown argument \"{}\"", argv[1]));
    if (!has_link()) return wrong_usage("descriptor 3 is not a daemon's link");
    Result<Identity> identity = Identity::parse(environment("BULKHEAD_WORKER"));
    if (!identity) return wrong_usage(identity.error().text());

    // A child of the model must not keep the link open.
    ::fcntl(link_fd, F_SETFD, FD_CLOEXEC);
    std::signal(SIGPIPE, SIG_IGN);
    // Line buffering: a model's output reaches the log however the process ends.
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    // The supervisor adds time and worker to each line.
    spdlog::set_default_logger(spdlog::stderr_logger_mt("worker"));
    spdlog::set_pattern("%l: %v");
    const SignalStack signal_stack;
    report_fatal_signals(link_fd);
    // The main thread, which lives as long as the process, holds the page's mutex. Never destroyed:
    // the kernel releases it.
    Result<std::unique_ptr<StatusPage>> page = StatusPage::make();
    if (!page) spdlog::warn("{}; a death of this worker is noticed later", page.error().text());

    // The context is made before the hello, which tells the daemon that it exists.
    if (identity->is_blank() && *environment("CUDA_VISIBLE_DEVICES") != '\0')
        if (const auto made = make_cuda_context(); !made) {
            spdlog::error("no context on its GPU: {}", made.error().text());
            return 1;
        }

    boost::asio::io_context io{1};
    Server server{io,
                  UniqueFd{link_fd},
                  {.identity = std::move(*identity),
                   .cache = environment("BULKHEAD_CACHE"),
                   .load = load_model,
                   .torch_version = torch_version(),
                   .page = page ? page->release() : nullptr,
                   // Without destructors: the driver's teardown returns all device memory,
                   // captured or not.
                   .exit = [](int status) { ::_exit(status); }}};

    boost::asio::signal_set terminate{io, SIGTERM};
    terminate.async_wait(HandlerLock::of(io).wrap([&](boost::system::error_code cancelled, int) {
        if (cancelled) return;
        terminate.clear();  // a second one ends the process at once
        server.drain(limits::terminate_drain);
    }));
    server.run();
    return 1;  // not reached: the server ends the process
}
