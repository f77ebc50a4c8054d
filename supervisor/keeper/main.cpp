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
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/base/say.h"
#include "supervisor/keeper/keeper.h"

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
    int state_fd = -1;  ///< what the program before this one left
};

/// Empty if the program is to end with `exit_status`.
std::optional<Options> parse(int argc, char** argv, int& exit_status) {
    constexpr std::array<option, 7> long_options{{{"socket", required_argument, nullptr, 's'},
                                                  {"supervisor", required_argument, nullptr, 'p'},
                                                  {"help", no_argument, nullptr, 'h'},
                                                  {"version", no_argument, nullptr, 'v'},
                                                  {resume_option + 2, required_argument, nullptr, 'r'},
                                                  {check_state_option + 2, required_argument, nullptr, 'c'},
                                                  {}}};
    Options options;
    exit_status = exit_wrong_usage;
    for (int found = 0; (found = ::getopt_long(argc, argv, "h", long_options.data(), nullptr)) != -1;) {
        switch (found) {
        case 's': options.socket = optarg; break;
        case 'p': options.supervisor = optarg; break;
        case 'r':
        case 'c': options.state_fd = std::atoi(optarg); break;
        case 'h':
        case 'v':
            std::fputs(found == 'h' ? usage : "bulkheadd " BULKHEAD_VERSION "\n", stdout);
            exit_status = 0;
            return std::nullopt;
        // Getopt printed what is wrong.
        default: std::fputs("try `bulkheadd --help`\n", stderr); return std::nullopt;
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

/// Resets all handlers to their defaults, so that children need no reset. Blocks the signals that
/// the loop reads, and SIGPIPE: ignoring it would be inherited by children.
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

/// Allows as many descriptors as the system permits: each worker needs three. Children
/// inherit the limit.
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

/// Prepares what a first start and a re-execution have in common.
Result<Station> make_station(Options options, RuntimeDirectory directory, OwnProgram program, UniqueFd null) {
    const bool is_beside_us = options.supervisor.empty();
    if (is_beside_us) {
        const auto self = program_file("finding bulkhead-supervisor beside this program");
        if (!self) return self.error();
        options.supervisor = self->substr(0, self->rfind('/') + 1) + "bulkhead-supervisor";
    }
    auto signals = prepare_signals();
    if (!signals) return signals.error();
    auto spawner = Spawner::make();
    if (!spawner) return spawner.error();
    if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return system_error("becoming a subreaper", errno);
    raise_descriptor_limit();
    const std::string socket_path = directory.socket_path();
    return Station{.directory = std::move(directory),
                   .command = SupervisorCommand{std::move(options.supervisor), socket_path, std::move(options.fleet),
                                                is_beside_us ? program.path() : ""},
                   .program = std::move(program),
                   .service_manager = ServiceManager::from_environment(),
                   .spawner = *spawner,
                   .null = std::move(null),
                   .signals = std::move(*signals)};
}

Result<std::unique_ptr<Keeper>> begin(Options options, OwnProgram program, UniqueFd null) {
    auto socket_path = control_socket_path(options.socket);
    if (!socket_path) return socket_path.error();
    auto directory = RuntimeDirectory::open(*socket_path);
    if (!directory) return directory.error();
    auto station = make_station(std::move(options), std::move(*directory), std::move(program), std::move(null));
    if (!station) return station.error();

    const int oom_score = read_oom_score();
    set_own_oom_score(std::max(oom_score + limits::oom_score_keeper, -999));
    station->oom_score_own = read_oom_score();
    station->oom_score_worker = std::min(oom_score + limits::oom_score_worker, 1000);
    return std::make_unique<Keeper>(std::move(*station));
}

Result<std::unique_ptr<Keeper>> resume(Options options, OwnProgram program, UniqueFd null) {
    const UniqueFd memfd{options.state_fd};
    const auto bytes = map_state(memfd.get());
    if (!bytes) return bytes.error();
    const auto state = parse_state(bytes->bytes());
    if (!state) return state.error();
    if (state->keeper.pid != ::getpid())
        return Error{ErrorCode::protocol_violation, "taking over: the state is another process's", "use no --resume"};
    auto directory = RuntimeDirectory::resume(state->socket_path, UniqueFd{state->keeper.directory_fd},
                                              UniqueFd{state->keeper.listening_fd});
    if (!directory) return directory.error();
    auto station = make_station(std::move(options), std::move(*directory), std::move(program), std::move(null));
    if (!station) return station.error();
    station->oom_score_own = read_oom_score();
    station->oom_score_worker = state->keeper.oom_score_worker;

    auto keeper = std::make_unique<Keeper>(std::move(*station));
    keeper->resume(*state);
    say("INFO keeper pid=%d re-executed version=%s workers=%zu", ::getpid(), BULKHEAD_VERSION, state->workers.size());
    return keeper;
}

/// Called by a running release that would become this one.
int check_state(int state_fd) {
    const auto bytes = map_state(state_fd);
    if (!bytes) return fail(bytes.error());
    const auto state = parse_state(bytes->bytes());
    return state ? 0 : fail(state.error());
}

int start(int argc, char** argv) {
    auto program = OwnProgram::find(argc, argv);
    auto null = reserve_low_descriptors(starts_from_state(argc, argv) ? Inherited::kept : Inherited::closed);
    if (!null) return fail(null.error());
    if (!program) return fail(program.error());

    const std::string_view first{argc > 1 ? argv[1] : ""};
    const bool only_checks = first == check_state_option;
    const bool resumes = first == resume_option;
    int exit_status = 0;
    auto options = parse(argc, argv, exit_status);
    if (!options) return exit_status;
    if (only_checks) return check_state(options->state_fd);
    auto keeper = resumes ? resume(std::move(*options), std::move(*program), std::move(*null))
                          : begin(std::move(*options), std::move(*program), std::move(*null));
    if (!keeper) return fail(keeper.error());
    return (*keeper)->run();
}

}  // namespace
}  // namespace bulkhead::keeper

int main(int argc, char** argv) {
    namespace keeper = bulkhead::keeper;
    const bool had_children = keeper::starts_from_state(argc, argv);
    const int status = keeper::start(argc, argv);
    // Workers that could not be taken over would run forever: kill them.
    if (had_children) keeper::kill_everything({}, -1, keeper::Clock::now() + keeper::limits::kill_everything_deadline);
    return status;
}
