#include <sys/socket.h>

#include <fstream>
#include <string>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/control/control_rules.h"

namespace bulkhead::control {
namespace {

/// Checks argv[0], which the keeper sets, wherever the program's file lies.
bool is_supervisor(pid_t pid) {
    std::ifstream file{fmt::format("/proc/{}/cmdline", pid), std::ios::binary};
    std::string name;
    return std::getline(file, name, '\0') && name == "bulkhead-supervisor";
}

/// Returns the supervisor that serves this socket: a child of the keeper, which listens there.
/// Nothing if there is none now, or this process may not see it.
std::optional<pid_t> find_supervisor(int connected_socket) {
    ucred keeper{};
    socklen_t size = sizeof keeper;
    if (::getsockopt(connected_socket, SOL_SOCKET, SO_PEERCRED, &keeper, &size) != 0) return std::nullopt;
    std::ifstream children{fmt::format("/proc/{0}/task/{0}/children", keeper.pid)};
    for (pid_t child = 0; children >> child;)
        if (is_supervisor(child)) return child;
    return std::nullopt;
}

}  // namespace

std::optional<Error> hang_of_supervisor(const std::filesystem::path& socket) {
    Result<ControlConnection> connection = ControlConnection::connect(socket);
    if (!connection) return std::nullopt;
    const auto before = find_supervisor(connection->fd());
    if (!before) return std::nullopt;
    const auto until = deadline_in(limits::hang_probe);
    const Result<bool> sent = connection->send("{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.ping\"}\n", until);
    if (!sent || !*sent) return std::nullopt;
    const auto answer = connection->receive(until);
    if (answer || answer.error().code != ErrorCode::deadline_exceeded) return std::nullopt;
    // A new supervisor may be about to answer.
    if (find_supervisor(connection->fd()) != before) return std::nullopt;
    return Error{ErrorCode::deadline_exceeded, fmt::format("the supervisor, pid {}, answers nothing", *before),
                 fmt::format("it hangs; `kill -9 {}`: workers run on and the next one adopts them", *before)};
}

}  // namespace bulkhead::control
