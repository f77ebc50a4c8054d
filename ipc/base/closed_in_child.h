#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bulkhead {

/// A descriptor that a forked child must not keep: a child that holds a channel's socket keeps it
/// open after its parent's death; one that holds a slab keeps its memory. In the child of a `fork`,
/// the number is replaced by a socket without a peer: reads see the end, writes fail, and the owner
/// closes it as before. (Without two free numbers in the process, the socket never had a peer, and
/// reads fail too.) `not_inherited` is a mapping marked MADV_DONTFORK. The child gets an
/// inaccessible mapping in its place, so that its unmapping hits nothing else. A program that a
/// child executes never has the descriptor: all are close-on-exec. `posix_spawn` and `vfork` run no
/// fork handlers and need none.
///
/// Owns    the registration; the owner of descriptor and mapping must drop it before them
/// Thread  any
class ClosedInChild {
public:
    ClosedInChild() noexcept = default;
    explicit ClosedInChild(int fd, std::span<std::byte> not_inherited = {});
    ClosedInChild(ClosedInChild&& other) noexcept;
    ClosedInChild& operator=(ClosedInChild&& other) noexcept;
    ~ClosedInChild();

    /// A parent of this process registered it; in this process it is closed.
    [[nodiscard]] bool in_child() const noexcept;

private:
    int fd_ = -1;
    std::uint64_t fork_ = 0;
};

}  // namespace bulkhead
