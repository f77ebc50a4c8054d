#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <filesystem>

#include "ipc/base/unique_fd.h"

namespace bulkhead::test {

/// A socket for which `act`, bind or connect, has the address of a path. An empty one where that
/// fails, with errno.
inline UniqueFd unix_socket(const std::filesystem::path& path, int type, decltype(::connect)* act) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.string().copy(address.sun_path, sizeof address.sun_path - 1);
    UniqueFd socket{::socket(AF_UNIX, type | SOCK_CLOEXEC, 0)};
    if (act(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) socket.reset();
    return socket;
}
[[nodiscard]] inline UniqueFd unix_client(const std::filesystem::path& path, int type = SOCK_STREAM) {
    return unix_socket(path, type, ::connect);
}
[[nodiscard]] inline UniqueFd unix_listener(const std::filesystem::path& path, int type = SOCK_STREAM) {
    UniqueFd socket = unix_socket(path, type, ::bind);
    if (socket && ::listen(socket.get(), SOMAXCONN) != 0) socket.reset();
    return socket;
}

}  // namespace bulkhead::test
