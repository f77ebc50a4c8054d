// bulkhead_soak: kills in bulk, and what is left of each resource afterwards.
// scripts/soak is its face.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "tests/soak/soak.h"
#include "tests/support/file_text.h"

namespace {

constexpr const char* usage =
    "usage: bulkhead_soak [--worker-kills N] [--supervisor-kills N] [--client-kills N]\n"
    "                     [--memory-histories N] [--swap-seconds N]\n"
    "                     [--model minimal|minimal-gpu|gpu-slabs|real] [--workers N] [--clients N] [--life-ms N]\n"
    "                     [--pause-ms N] [--minutes N] [--seed N]\n";

std::vector<pid_t> own_children() {
    std::vector<pid_t> children;
    std::error_code gone;
    for (const auto& task : std::filesystem::directory_iterator{"/proc/self/task", gone}) {
        std::istringstream text{bulkhead::test::file_text(task.path() / "children")};
        for (pid_t pid = 0; text >> pid;) children.push_back(pid);
    }
    return children;
}

/// From now on a signal to end, such as Ctrl-C, first stops the daemons and then ends the program:
/// nothing is left.
void end_with_the_daemons() {
    static sigset_t ends;
    ::sigemptyset(&ends);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&ends, number);
    ::pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // before any thread: each inherits it
    std::thread{[] {
        int number = 0;
        ::sigwait(&ends, &number);
        std::printf("ended by a signal, %s\n", ::strsignal(number));
        std::fflush(stdout);
        // What fails from here on is of no interest.
        if (const int nowhere = ::open("/dev/null", O_WRONLY); nowhere >= 0) ::dup2(nowhere, 1);
        const auto children = own_children();
        for (const pid_t child : children) {  // a keeper unloads everything; others have the signal
                                              // blocked as we have
            const auto name = bulkhead::test::file_text("/proc/" + std::to_string(child) + "/comm");
            ::kill(child, name == "bulkheadd\n" ? SIGTERM : SIGKILL);
        }
        for (const pid_t child : children) ::waitpid(child, nullptr, 0);
        ::_exit(128 + number);
    }}.detach();
}

}  // namespace

int main(int argc, char** argv) {
    end_with_the_daemons();
    ::testing::InitGoogleTest();  // the fixture reports through it
    bulkhead::soak::Options options;
    const std::pair<std::string_view, std::variant<std::int64_t*, std::uint64_t*, int*>> numbers[] = {
        {"--worker-kills", &options.worker_kills}, {"--supervisor-kills", &options.supervisor_kills},
        {"--client-kills", &options.client_kills}, {"--memory-histories", &options.memory_histories},
        {"--swap-seconds", &options.swap_seconds}, {"--workers", &options.workers},
        {"--clients", &options.clients},           {"--life-ms", &options.life_ms_max},
        {"--pause-ms", &options.pause_ms},         {"--minutes", &options.minutes},
        {"--seed", &options.seed}};
    for (int i = 1; i < argc; ++i) {
        const std::string_view name{argv[i]};
        const char* value = i + 1 < argc ? argv[++i] : nullptr;
        if (value == nullptr) return std::fputs(usage, stderr), 2;
        if (name == "--model") {
            options.model = value;
            continue;
        }
        const auto number = std::ranges::find(numbers, name, [](const auto& one) { return one.first; });
        if (number == std::end(numbers)) return std::fputs(usage, stderr), 2;
        std::visit([&](auto* to) { *to = static_cast<std::remove_pointer_t<decltype(to)>>(std::strtol(value, nullptr, 10)); },
                   number->second);
    }
    if (std::ranges::find(bulkhead::soak::kinds, options.model) == std::end(bulkhead::soak::kinds))
        return std::fputs(usage, stderr), 2;
    if (options.worker_kills == 0 && options.supervisor_kills == 0 && options.client_kills == 0 &&
        options.memory_histories == 0 && options.swap_seconds == 0)
        return std::fputs(usage, stderr), 2;
    int wrong = 0;
    if (options.worker_kills > 0) wrong += bulkhead::soak::kill_workers(options);
    if (options.swap_seconds > 0) wrong += bulkhead::soak::swap_models(options);
    if (options.supervisor_kills > 0) wrong += bulkhead::soak::kill_supervisors(options);
    if (options.client_kills > 0) wrong += bulkhead::soak::kill_clients(options);
    if (options.memory_histories > 0) wrong += bulkhead::soak::live_memory_histories(options);
    if (::testing::Test::HasFailure()) ++wrong;
    std::printf(wrong == 0 ? "nothing drifted, nothing was wrong\n" : "%d things were wrong\n", wrong);
    return wrong == 0 ? 0 : 1;
}
