#include "worker/loop/status_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <csignal>

#include "tests/support/worker/loop_harness.h"
#include "tests/support/worker/page_reader.h"

namespace bulkhead::worker::test {
namespace {

TEST(StatusPage, CanBeChangedByNobodyElse) {
    const auto page = StatusPage::make().value();

    EXPECT_EQ(::ftruncate(page->fd(), 0), -1);
    EXPECT_EQ(::fcntl(page->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    EXPECT_EQ(::mmap(nullptr, worker_page::page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, page->fd(), 0), MAP_FAILED);
}

TEST(StatusPage, TellsWhatRunsInBoundedWords) {
    const auto page = StatusPage::make().value();
    const std::string endless(5'000, 'x');
    {
        const RunningMark mark{page.get(), Clock::time_point{42ns}, "12" + endless};
        const SeenPage seen = page_seen(page->fd());
        EXPECT_EQ(seen.running_since_ns, 42U);
        EXPECT_EQ(std::string{seen.request.data()}, "12" + endless.substr(0, worker_page::request_text_bytes - 3));
        EXPECT_EQ(seen.request_sequence % 2, 0U);
        page->step("forward -1");
        EXPECT_STREQ(page_seen(page->fd()).request.data(), "forward -1");
        EXPECT_EQ(page_seen(page->fd()).steps, 1U);
    }
    EXPECT_EQ(page_seen(page->fd()).steps, 2U);
    EXPECT_EQ(page_seen(page->fd()).running_since_ns, 0U);
}

/// A process of `resident_bytes` that holds its word, killed; true when its word told before
/// its pidfd did.
bool word_tells_before_pidfd(std::size_t resident_bytes) {
    auto [parent_end, child_end] = PacketPair::make().value();
    const pid_t child = ::fork();
    if (child == 0) {
        const auto page = StatusPage::make();
        void* const memory =
            ::mmap(nullptr, resident_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        const int fd = page ? (*page)->fd() : -1;
        if (memory != MAP_FAILED) (void)send_packet(child_end.get(), "made", {&fd, 1U});
        for (;;) ::pause();
    }
    child_end.reset();
    const UniqueFd pidfd{static_cast<int>(::syscall(SYS_pidfd_open, child, 0))};
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    EXPECT_TRUE(receive_packet(parent_end.get(), buffer, packet));
    bool first = false;
    if (packet.fds.size() == 1) {
        const PageReader reader{packet.fds.front().get()};
        EXPECT_EQ(reader.word(), static_cast<std::uint32_t>(child) | FUTEX_WAITERS);
        ::kill(child, SIGKILL);
        EXPECT_TRUE(reader.await_death(20s));
        first = !readable_within(pidfd.get(), 0ms);
    } else {
        ADD_FAILURE() << "the child made no page";
        ::kill(child, SIGKILL);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    return first;
}

TEST(StatusPage, ItsWordShowsADeathBeforeTheProcessesMemoryIsFreed) {
    // The kernel's order is fixed; which of two events this process comes to see first is not, on
    // a busy machine.
    bool first = false;
    for (int attempt = 0; attempt < 5 && !first; ++attempt) first = word_tells_before_pidfd(std::size_t{300} << 20);
    EXPECT_TRUE(first);
}

}  // namespace
}  // namespace bulkhead::worker::test
