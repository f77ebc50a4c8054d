/// bulkheadd: prepares the process, then hands it to the Keeper.

#include <fcntl.h>
#include <getopt.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "supervisor/keeper/keeper.h"
#include "supervisor/keeper/limits.h"
#include "supervisor/keeper/say.h"

namespace bulkhead::keeper {
namespace {

constexpr int exit_wrong_usage = 2;

constexpr const char* usage =
    "Usage: bulkheadd [--socket PATH] [--supervisor PROGRAM] FLEET.yaml\n"
    "\n"
    "Keeps the processes of one fleet: starts bulkhead-supervisor, is the parent of every worker, and\n"
    "restarts the supervisor without losing them. Stays in the foreground; `bulkhead up` detaches it.\n"
    "\n"
    "  --socket PATH         control socket (default $BULKHEAD_SOCKET, then\n"
    "                        $XDG_RUNTIME_DIR/bulkhead/control.sock, then /run/bulkhead/control.sock)\n"
    "  --supervisor PROGRAM  (default: bulkhead-supervisor beside this program)\n"
    "  --help, --version\n"
    "\n"
    "SIGTERM, SIGINT: unload everything and end; a second one ends at once. SIGHUP: reload FLEET.yaml.\n"
    "Exit status: 0 stopped, 1 failed, 2 wrong usage, 78 FLEET.yaml is invalid.\n";

struct Options {
    std::string socket;
    std::string supervisor;
    std::string fleet;
};

/// Empty when the program is to end with `exit_status`.
std::optional<Options> parse(int argc, char** argv, int& exit_status) {
    constexpr std::array<option, 5> long_options{{{"socket", required_argument, nullptr, 's'},
                                                  {"supervisor", required_argument, nullptr, 'p'},
                                                  {"help", no_argument, nullptr, 'h'},
                                                  {"version", no_argument, nullptr, 'v'},
                                                  {}}};
    Options options;
    exit_status = exit_wrong_usage;
    for (int found = 0; (found = ::getopt_long(argc, argv, "h", long_options.data(), nullptr)) != -1;) {
        switch (found) {
        case 's': options.socket = optarg; break;
        case 'p': options.supervisor = optarg; break;
        case 'h':
        case 'v':
            std::fputs(found == 'h' ? usage : "bulkheadd " BULKHEAD_VERSION "\n", stdout);
            exit_status = 0;
            return std::nullopt;
        default: std::fputs("try `bulkheadd --help`\n", stderr); return std::nullopt;  // getopt said what is wrong
        }
    }
    if (optind != argc - 1) {
        say("error: reading the command line: %d fleet files given; name exactly one, and see `bulkheadd --help`",
            argc - optind);
        return std::nullopt;
    }
    options.fleet = argv[optind];
    return options;
}

Result<std::string> supervisor_beside_us() {
    std::array<char, 4096> path{};
    const ssize_t size = ::readlink("/proc/self/exe", path.data(), path.size());
    if (size < 0 || static_cast<std::size_t>(size) == path.size())
        return system_error("finding bulkhead-supervisor beside this program (reading /proc/self/exe)", errno);
    const std::string self{path.data(), static_cast<std::size_t>(size)};
    return self.substr(0, self.rfind('/') + 1) + "bulkhead-supervisor";
}

/// Handlers at their defaults, so that children need no reset; what the loop reads is blocked. SIGPIPE is
/// blocked, not ignored, since children would inherit that.
Result<UniqueFd> prepare_signals() {
    for (int number = 1; number <= SIGRTMAX; ++number) ::signal(number, SIG_DFL);
    sigset_t read_by_loop;
    ::sigemptyset(&read_by_loop);
    for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) ::sigaddset(&read_by_loop, number);
    sigset_t blocked = read_by_loop;
    ::sigaddset(&blocked, SIGPIPE);
    ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
    UniqueFd signals{::signalfd(-1, &read_by_loop, SFD_CLOEXEC | SFD_NONBLOCK)};
    if (!signals) return system_error("creating a signalfd", errno);
    return signals;
}

/// Three descriptors a worker: as many as the system lets us have. Children inherit it.
void raise_descriptor_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
}

int read_oom_score() {
    std::array<char, 16> text{};
    const UniqueFd file{::open("/proc/self/oom_score_adj", O_RDONLY | O_CLOEXEC)};
    const ssize_t size = file ? ::read(file.get(), text.data(), text.size()) : 0;
    int score = 0;
    std::from_chars(text.data(), text.data() + std::max<ssize_t>(size, 0), score);
    return score;
}

int fail(const Error& error) {
    say("error: %s", error.text().c_str());
    return 1;
}

int start(int argc, char** argv) {
    auto null = reserve_low_descriptors();
    if (!null) return fail(null.error());

    int exit_status = 0;
    auto options = parse(argc, argv, exit_status);
    if (!options) return exit_status;
    auto socket_path = control_socket_path(std::move(options->socket));
    if (!socket_path) return fail(socket_path.error());
    if (options->supervisor.empty()) {
        auto program = supervisor_beside_us();
        if (!program) return fail(program.error());
        options->supervisor = std::move(*program);
    }

    auto signals = prepare_signals();
    if (!signals) return fail(signals.error());
    auto directory = RuntimeDirectory::open(*socket_path);
    if (!directory) return fail(directory.error());
    auto spawner = Spawner::make();
    if (!spawner) return fail(spawner.error());
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return fail(system_error("becoming a subreaper", errno));
    raise_descriptor_limit();
    const int oom_score = read_oom_score();
    set_own_oom_score(std::max(oom_score + limits::oom_score_keeper, -999));

    const auto keeper = std::make_unique<Keeper>(
        Station{.directory = std::move(*directory),
                .command = SupervisorCommand{std::move(options->supervisor), *socket_path, std::move(options->fleet)},
                .spawner = *spawner,
                .null = std::move(*null),
                .signals = std::move(*signals),
                .oom_score_own = read_oom_score(),
                .oom_score_worker = std::min(oom_score + limits::oom_score_worker, 1000)});
    return keeper->run();
}

}  // namespace
}  // namespace bulkhead::keeper

int main(int argc, char** argv) { return bulkhead::keeper::start(argc, argv); }
