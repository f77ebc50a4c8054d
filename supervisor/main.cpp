/// bulkhead-supervisor --socket PATH FLEET.yaml: started by bulkheadd with its link on descriptor 3
/// and the listening control socket on 4.
///
/// bulkhead-supervisor --check FLEET.yaml: started by the running supervisor before a hand-over.
/// Reads the fleet, prints its version and that of its keeper link, and exits with 0 or 78.

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "config/reader.h"
#include "supervisor/fleet/fleet_files.h"
#include "supervisor/keeper_link/next_supervisor.h"
#include "supervisor/log/daemon_log.h"
#include "supervisor/replica/worker_environment.h"
#include "supervisor/supervisor.h"

namespace {

using namespace bulkhead;

constexpr int exit_usage = 2;
constexpr int exit_failed = 1;
constexpr int exit_config_invalid = 78;

struct Arguments {
    std::string socket;
    std::string fleet;
    bool only_checks = false;
};

std::optional<Arguments> parse_arguments(int argc, char** argv) {
    Arguments arguments;
    for (int i = 1; i < argc; ++i) {
        const std::string_view word{argv[i]};
        if (word == "--socket" && i + 1 < argc)
            arguments.socket = argv[++i];
        else if (word == supervisor::check_option)
            arguments.only_checks = true;
        else if (!word.starts_with("-") && arguments.fleet.empty())
            arguments.fleet = word;
        else
            return std::nullopt;
    }
    if (arguments.socket.empty() != arguments.only_checks || arguments.fleet.empty()) return std::nullopt;
    return arguments;
}

bool is_socket(int fd) {
    struct stat status {};
    return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

int fail(const Error& error, int status) {
    supervisor::say_on_standard_error("error: " + error.text());
    return status;
}

int check(const std::string& fleet) {
    fmt::print("{}\n", supervisor::introduction());
    const auto read = config::read_fleet(fleet);
    for (const auto& diagnostic : read.diagnostics)
        fmt::print(stderr, "error: {}: {}\n", to_string(diagnostic.error.code), diagnostic.text());
    return read.ok() ? 0 : exit_config_invalid;
}

int supervise(const Arguments& arguments, const std::optional<supervisor::LogStore>& logs) {
    auto read = config::read_fleet(arguments.fleet);
    for (const auto& diagnostic : read.diagnostics) supervisor::say_on_standard_error("error: " + diagnostic.text());
    for (const auto& warning : read.warnings) spdlog::warn("fleet file: {}", warning.text());
    std::string fleet_error;
    if (read.ok()) {
        if (logs) {
            logs->writer->save("last good fleet",
                               [folder = logs->folder, read] { supervisor::save_last_good_fleet(folder, read); });
            (void)logs->writer->flush();  // the next supervisor needs the file, so write it
                                          // before anything else
        }
    } else {
        // Not the first supervisor of this keeper: workers may run, and a typing error
        // must not end them.
        auto last_good = logs ? supervisor::load_last_good_fleet(logs->folder) : std::nullopt;
        if (!last_good) return exit_config_invalid;
        fleet_error = read.diagnostics.front().text();
        read.fleet = std::move(*last_good);
    }

    auto cache = supervisor::make_package_cache();
    if (!cache) return fail(cache.error(), exit_failed);
    std::error_code ec;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", ec);
    if (ec) return fail(system_error("finding this program", ec.value()), exit_failed);

    supervisor::SupervisorOptions options;
    options.socket = arguments.socket;
    options.worker_program = program.parent_path() / "bulkhead-worker";
    options.python_start = program.parent_path().parent_path() / "share/bulkhead/python/bulkhead/worker/start.py";
    options.fleet = std::move(read.fleet);
    options.cache = *cache;
    options.fleet_error = std::move(fleet_error);
    options.logs = logs;
    options.inherited = supervisor::inheritable(environ);
    options.keeper_link = UniqueFd{keeper_link::child_link_fd};
    options.listener = UniqueFd{keeper_link::child_listen_fd};
    return supervisor::run_supervisor(std::move(options));
}

}  // namespace

int main(int argc, char** argv) {
    const auto arguments = parse_arguments(argc, argv);
    if (!arguments) {
        fmt::print(stderr, "usage: bulkhead-supervisor --socket PATH FLEET.yaml\n"
                           "bulkheadd starts it; `bulkhead up FLEET.yaml` starts bulkheadd\n");
        return exit_usage;
    }
    if (arguments->only_checks) return check(arguments->fleet);
    if (!is_socket(keeper_link::child_link_fd) || !is_socket(keeper_link::child_listen_fd)) {
        fmt::print(stderr, "error: descriptors 3 and 4 are not sockets; start bulkheadd instead\n");
        return exit_usage;
    }
    std::signal(SIGPIPE, SIG_IGN);
    ::umask(077);  // logs and cache are readable by their owner only

    const auto logs = supervisor::make_log_store(std::filesystem::path{arguments->socket}.parent_path());
    supervisor::open_daemon_log(logs);
    const int status = supervise(*arguments, logs);
    if (!supervisor::end_daemon_log(logs)) std::_Exit(status);
    return status;
}
