/// A forked child keeps neither a channel's socket nor its slabs.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include <gtest/gtest.h>

#include "ipc/base/closed_in_child.h"
#include "ipc/base/packet.h"
#include "ipc/slab/host_slab.h"
#include "tests/support/in_child.h"

namespace bulkhead {
namespace {

using test::in_child;

TEST(ClosedInChild, TheChildsDescriptorIsDeadAndTheParentsServes) {
    PacketPair pair = PacketPair::make().value();
    const ClosedInChild guard{pair.first.get()};

    EXPECT_EQ(in_child([&] {
                  char byte = 0;
                  if (!guard.in_child()) return 1;
                  if (::read(pair.first.get(), &byte, 1) != 0) return 2;
                  if (::send(pair.first.get(), "x", 1, MSG_NOSIGNAL) != -1 || errno != EPIPE) return 3;
                  if ((::fcntl(pair.first.get(), F_GETFD) & FD_CLOEXEC) == 0) return 4;
                  pair.first.reset();
                  return 0;
              }),
              0);

    EXPECT_FALSE(guard.in_child());
    EXPECT_TRUE(send_packet(pair.first.get(), "still here"));
}

TEST(ClosedInChild, ADroppedOneIsForgotten) {
    PacketPair pair = PacketPair::make().value();
    { const ClosedInChild guard{pair.first.get()}; }
    EXPECT_EQ(in_child([&] { return send_packet(pair.first.get(), "its own affair") ? 0 : 1; }), 0);
    ClosedInChild moved{pair.first.get()};
    moved = ClosedInChild{pair.second.get()};
    EXPECT_EQ(in_child([&] {
                  char byte = 0;
                  return ::read(pair.second.get(), &byte, 1) == 0 && send_packet(pair.first.get(), "let go of") ? 0 : 1;
              }),
              0);
}

TEST(ClosedInChild, WithoutAFreeNumberItsNumberStaysTaken) {
    PacketPair pair = PacketPair::make().value(), other = PacketPair::make().value();
    const ClosedInChild guard{pair.first.get()}, another{other.first.get()};
    std::vector<UniqueFd> all;
    for (;;) {
        UniqueFd next{::dup(0)};
        if (!next) break;
        all.push_back(std::move(next));
    }
    for (int free = 0; free < 3; ++free) {
        EXPECT_EQ(in_child([&] {
                      char byte = 0;
                      for (const int fd : {pair.first.get(), other.first.get()}) {
                          if ((::fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0) return 1;
                          errno = 0;
                          if (::read(fd, &byte, 1) > 0 || errno == EAGAIN) return 2;
                          if (::send(fd, "x", 1, MSG_NOSIGNAL) != -1) return 3;
                      }
                      int found = 0;
                      while (::dup(0) >= 0) ++found;
                      return found == free ? 0 : 4;  // what the child opens takes no
                                                     // number of an owner's
                  }),
                  0)
            << free << " numbers free";
        all.pop_back();
    }
    EXPECT_TRUE(send_packet(pair.first.get(), "still here"));
}

TEST(ClosedInChild, AboveALimitThatWasLoweredItIsClosed) {
    PacketPair pair = PacketPair::make().value();
    const ClosedInChild guard{pair.first.get()};
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit below{static_cast<rlim_t>(pair.first.get()), before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &below);
    EXPECT_EQ(in_child([&] { return ::fcntl(pair.first.get(), F_GETFD) == -1 && errno == EBADF ? 0 : 1; }), 0);
    ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST(ClosedInChild, ASlabThatIsReplacedLetsGoOfItsNumber) {
    const HostSlab worker = HostSlab::create(1 << 20, wire::SlabDirection::input, "slab").value();
    const auto adopted = [&] {
        return HostSlab::adopt(UniqueFd{::dup(worker.fd())}, 1 << 20, wire::SlabDirection::input).value();
    };
    HostSlab slab = adopted();
    const int number = slab.fd();
    slab = adopted();
    PacketPair pair = PacketPair::make().value();
    ASSERT_TRUE(pair.first.get() == number || pair.second.get() == number);
    const bool first = pair.first.get() == number;

    EXPECT_EQ(in_child([&] {
                  struct stat status {};
                  if (::fstat(slab.fd(), &status) != 0 || S_ISREG(status.st_mode)) return 1;
                  return send_packet(first ? pair.first.get() : pair.second.get(), "its own affair") ? 0 : 2;
              }),
              0);
    slab.bytes()[0] = std::byte{7};
    EXPECT_EQ(worker.bytes()[0], std::byte{7});
}

TEST(ClosedInChild, AChildHoldsNoSlabAndUnmapsNothingOfItsOwn) {
    const HostSlab worker = HostSlab::create(1 << 20, wire::SlabDirection::input, "slab").value();
    std::optional<HostSlab> slab =
        HostSlab::adopt(UniqueFd{::dup(worker.fd())}, 1 << 20, wire::SlabDirection::input).value();
    slab->bytes()[0] = std::byte{7};

    EXPECT_EQ(in_child([&] {
                  struct stat status {};
                  if (::fstat(slab->fd(), &status) != 0 || S_ISREG(status.st_mode)) return 1;
                  std::byte* place = slab->bytes().data();
                  // Taken: nothing that the child allocates can come to lie where the slab's
                  // owner will unmap.
                  void* wanted =
                      ::mmap(place, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                  if (wanted != MAP_FAILED || errno != EEXIST) return 2;
                  slab.reset();
                  return 0;
              }),
              0);
    EXPECT_EQ(slab->bytes()[0], std::byte{7});
}

}  // namespace
}  // namespace bulkhead
