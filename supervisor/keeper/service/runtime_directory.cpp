#include "supervisor/keeper/service/runtime_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/limits.h"

namespace bulkhead::keeper {
namespace {

/// An absolute path, split at its last slash.
struct SocketPath {
    std::string whole;
    std::string directory;
    std::string name;
    sockaddr_un address{};
};

Result<SocketPath> split(const std::string& path) {
    SocketPath parts{.whole = path, .directory = {}, .name = {}};
    const std::size_t slash = path.rfind('/');
    parts.directory = slash == 0 ? "/" : path.substr(0, slash);
    parts.name = path.substr(slash + 1);
    if (parts.name.empty() || parts.name == "." || parts.name == "..")
        return Error{ErrorCode::config_invalid, "opening the control socket \"" + path + "\": it names no file",
                     "name a file, such as /run/bulkhead/control.sock"};
    if (path.size() >= sizeof parts.address.sun_path)
        return Error{ErrorCode::config_invalid,
                     "opening the control socket " + path + ": " + std::to_string(path.size()) +
                         " bytes are more than the " + std::to_string(sizeof parts.address.sun_path - 1) +
                         " a Unix socket's path may have",
                     "choose a shorter path with --socket or $BULKHEAD_SOCKET"};
    parts.address.sun_family = AF_UNIX;
    std::memcpy(parts.address.sun_path, path.c_str(), path.size() + 1);
    return parts;
}

Error refusal(const std::string& directory, const std::string& reason) {
    return Error{ErrorCode::not_permitted, "using the runtime directory " + directory + ": " + reason,
                 "remove it, or choose another one with --socket or $BULKHEAD_SOCKET"};
}

/// Parents may be symlinks (/var/run is one); the folder itself may not.
Result<UniqueFd> open_directory(const std::string& directory) {
    const std::size_t slash = directory.rfind('/');
    const std::string parent_path = slash == 0 ? "/" : directory.substr(0, slash);
    const std::string name = directory == "/" ? "." : directory.substr(slash + 1);

    const UniqueFd parent{::open(parent_path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)};
    if (!parent) return system_error("opening " + parent_path + " for the runtime directory", errno);
    if (::mkdirat(parent.get(), name.c_str(), 0700) != 0 && errno != EEXIST)
        return system_error("creating the runtime directory " + directory, errno);

    UniqueFd fd{::openat(parent.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
    if (!fd && (errno == ENOTDIR || errno == ELOOP)) return refusal(directory, "it is a symlink or no directory");
    if (!fd) return system_error("opening the runtime directory " + directory, errno);

    struct stat facts {};
    if (::fstat(fd.get(), &facts) != 0) return system_error("looking at the runtime directory " + directory, errno);
    if (facts.st_uid != ::geteuid())
        return refusal(directory, "it belongs to uid " + std::to_string(facts.st_uid) + ", not to uid " +
                                      std::to_string(::geteuid()));
    if ((facts.st_mode & (S_IRWXG | S_IRWXO)) != 0)
        return Error{ErrorCode::not_permitted,
                     "using the runtime directory " + directory + ": others than its owner may enter or write to it",
                     "`chmod 700` it, or choose another one with --socket or $BULKHEAD_SOCKET"};
    return fd;
}

UniqueFd stream_socket() { return UniqueFd{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)}; }

const sockaddr* as_sockaddr(const sockaddr_un& address) { return reinterpret_cast<const sockaddr*>(&address); }

/// Returns the pid of the listener; empty if there is none, 0 if its pid is unknown.
std::optional<pid_t> listener_of(const SocketPath& path) {
    const UniqueFd probe = stream_socket();
    if (!probe) return 0;
    if (::connect(probe.get(), as_sockaddr(path.address), sizeof path.address) != 0) {
        if (errno == ECONNREFUSED || errno == ENOENT) return std::nullopt;
        return 0;  // a full backlog (EAGAIN) has a listener too
    }
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(probe.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return 0;
    // A dying supervisor whose keeper is dead still holds the socket of that keeper.
    if (peer.pid > 0 && !process_exists(peer.pid)) return std::nullopt;
    return peer.pid;
}

Error already_running(const SocketPath& path, std::optional<pid_t> holder) {
    const std::string who =
        holder.value_or(0) > 0 ? "the daemon with pid " + std::to_string(*holder) : "another daemon";
    return Error{ErrorCode::already_running,
                 "starting a daemon on " + path.whole + ": " + who + " uses " + path.directory,
                 "use that one, or end it first with `bulkhead down`"};
}

Result<> remove_stale_socket(int directory, const SocketPath& path) {
    struct stat facts {};
    if (::fstatat(directory, path.name.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) return {};
    if (!S_ISSOCK(facts.st_mode))
        return Error{ErrorCode::not_permitted, "replacing " + path.whole + ": it is not a socket",
                     "move it away, or choose another path with --socket"};
    if (const auto holder = listener_of(path)) return already_running(path, holder);
    if (::unlinkat(directory, path.name.c_str(), 0) != 0)
        return system_error("removing the stale socket " + path.whole, errno);
    return {};
}

}  // namespace

Result<std::string> control_socket_path(std::string given) {
    const auto environment = [](const char* name) {
        const char* value = std::getenv(name);
        return std::string{value == nullptr ? "" : value};
    };
    std::string path = std::move(given);
    if (path.empty()) path = environment("BULKHEAD_SOCKET");
    if (path.empty()) {
        const std::string base = environment("XDG_RUNTIME_DIR");
        path = (base.empty() ? "/run" : base) + "/bulkhead/control.sock";
    }
    if (path.front() == '/') return path;
    char here[PATH_MAX];
    if (::getcwd(here, sizeof here) == nullptr) return system_error("finding the working directory", errno);
    return std::string{here} + "/" + path;
}

RuntimeDirectory::RuntimeDirectory(PathClaim claim, UniqueFd directory, std::string socket_path, UniqueFd listening)
    : claim_{std::move(claim)}, directory_{std::move(directory)}, socket_path_{std::move(socket_path)},
      listening_{std::move(listening)} {}

Result<RuntimeDirectory> RuntimeDirectory::open(const std::string& socket_path) {
    auto path = split(socket_path);
    if (!path) return path.error();
    PathClaim claim{path->directory};  // before the lock: the kernel closes it first, so no claim
                                       // outlives its lock
    auto directory = open_directory(path->directory);
    if (!directory) return directory.error();
    if (::flock(directory->get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) return already_running(*path, listener_of(*path));
        return system_error("locking the runtime directory " + path->directory, errno);
    }
    if (auto removed = remove_stale_socket(directory->get(), *path); !removed) return removed.error();
    if (const auto holder = claim.insist()) {
        const std::string pid = std::to_string(*holder);
        return Error{ErrorCode::already_running,
                     "starting a daemon on " + path->whole + ": the daemon with pid " + pid +
                         " runs there, though its directory was removed",
                     "end that one first: after `kill " + pid + "` it unloads everything"};
    }

    UniqueFd listening = stream_socket();
    if (!listening) return system_error("creating the control socket", errno);
    if (::bind(listening.get(), as_sockaddr(path->address), sizeof path->address) != 0)
        return system_error("binding the control socket " + path->whole, errno);
    // No client can connect before listen(), so the mode is set in time.
    if (::fchmodat(directory->get(), path->name.c_str(), 0600, 0) != 0)
        return system_error("setting the mode of " + path->whole, errno);
    if (::listen(listening.get(), limits::listen_backlog) != 0)
        return system_error("listening on " + path->whole, errno);
    return RuntimeDirectory{std::move(claim), std::move(*directory), std::move(path->whole), std::move(listening)};
}

Result<RuntimeDirectory> RuntimeDirectory::resume(const std::string& socket_path, UniqueFd directory,
                                                  UniqueFd listening) {
    auto path = split(socket_path);
    if (!path) return path.error();
    struct stat facts {};
    const bool locked = ::fstat(directory.get(), &facts) == 0 && S_ISDIR(facts.st_mode) &&
                        ::flock(directory.get(), LOCK_EX | LOCK_NB) == 0;
    int listens = 0;
    socklen_t size = sizeof listens;
    if (!locked || ::getsockopt(listening.get(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens != 1)
        return Error{ErrorCode::protocol_violation,
                     "taking over " + socket_path + " from the keeper before this one: its descriptors lead elsewhere",
                     "start the daemon again"};
    ::fcntl(directory.get(), F_SETFD, FD_CLOEXEC);
    ::fcntl(listening.get(), F_SETFD, FD_CLOEXEC);
    return RuntimeDirectory{PathClaim{path->directory}, std::move(directory), socket_path, std::move(listening)};
}

void RuntimeDirectory::remove_socket() noexcept {
    if (!listening_) return;
    ::unlinkat(directory_.get(), socket_path_.c_str() + socket_path_.rfind('/') + 1, 0);
    listening_.reset();
}

}  // namespace bulkhead::keeper
