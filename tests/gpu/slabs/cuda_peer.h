#pragma once

/// A second process that shares device memory with the test: this very program, started again (CUDA
/// bears no fork).

#include <sys/types.h>

#include <map>
#include <string>

#include "ipc/base/unique_fd.h"
#include "ipc/channel/wire.h"

namespace bulkhead::test {

/// Driven by one text a command, answered by one text: "ok …", or the error's words.
///
///   vmm create SIZE            → "ok", fd
///   vmm import SIZE ro|rw      with the fd
///   legacy create SIZE         → "ok HANDLE"
///   legacy import SIZE HANDLE
///   drop
///   event create               → "ok HANDLE"
///   event import HANDLE
///   event record, wait, query
///   stream block, unblock, synchronize
///   stream stamp               queued
///   stream stamped             → "ok NS": when the stream came to the last of them
///   channel hold MODEL         opens one at $BULKHEAD_TEST_SOCKET, with tensors on the GPU, and
///                              keeps them
///   channel send MODEL         the same, but does not wait for the result
///   read OFFSET                → "ok BYTE"
///   write OFFSET BYTE
///   fill OFFSET BYTE           queued, not waited for
///
/// It has one slab, one event and one stream. Killed, if it still runs, when this is dropped.
class CudaPeer {
public:
    explicit CudaPeer(const std::map<std::string, std::string>& environment = {});
    ~CudaPeer();
    CudaPeer(const CudaPeer&) = delete;
    CudaPeer& operator=(const CudaPeer&) = delete;

    /// Waits for the answer, 60 s at most.
    std::string ask(const std::string& command, int fd = -1);
    /// What came with the last answer.
    [[nodiscard]] UniqueFd take_fd() { return std::move(fd_); }
    void kill();
    [[nodiscard]] pid_t pid() const noexcept { return pid_; }

    /// The peer's own main. Returns when the test is gone.
    static int run();

private:
    pid_t pid_ = -1;
    UniqueFd socket_;
    UniqueFd fd_;
};

[[nodiscard]] std::string to_text(const wire::CudaIpcHandle& handle);
[[nodiscard]] wire::CudaIpcHandle handle_from(const std::string& text);

}  // namespace bulkhead::test
