#include "supervisor/reclaim/cgroup.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include <gtest/gtest.h>

namespace bulkhead::supervisor {
namespace {

/// A child that waits for a byte, and then takes this much memory.
struct Taker {
    explicit Taker(std::size_t bytes) {
        if (::pipe(pipe) != 0) std::abort();
        pid = ::fork();
        if (pid != 0) return;
        char byte = 0;
        (void)!::read(pipe[0], &byte, 1);
        void* const taken = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        std::memset(taken, 1, bytes);
        ::_exit(0);
    }
    int run() {
        (void)!::write(pipe[1], "x", 1);
        int status = 0;
        ::waitpid(pid, &status, 0);
        return status;
    }
    ~Taker() {
        ::close(pipe[0]);
        ::close(pipe[1]);
    }
    int pipe[2]{};
    pid_t pid = 0;
};

TEST(MemoryLimits, EndAProcessThatOutgrowsItsBoundAndNoOther) {
    const auto limits = MemoryLimits::make(nullptr, ::getpid());
    if (!limits) GTEST_SKIP() << "no memory cgroup in which this user may make one";
    const WorkerName worker{"m", 0, 1};
    Taker greedy{64 << 20};
    Taker modest{1 << 20};  // ThreadSanitizer notes four times as much beside it
    if (const auto set = limits->set(worker, greedy.pid, 16 << 20); !set) GTEST_SKIP() << set.error().text();
    ASSERT_TRUE(limits->set({"m", 1, 2}, modest.pid, 16 << 20));
    EXPECT_EQ(limits->bound(worker), 16u << 20);
    EXPECT_FALSE(limits->bound({"m", 2, 3})) << "nobody set one";

    const int ended = greedy.run();
    EXPECT_TRUE(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    EXPECT_EQ(limits->oom_kills(worker), 1u);

    EXPECT_EQ(modest.run(), 0);
    EXPECT_EQ(limits->oom_kills({"m", 1, 2}), 0u);
    limits->remove(worker);
    limits->remove({"m", 1, 2});
    EXPECT_FALSE(limits->oom_kills(worker)) << "its folder is gone";
}

}  // namespace
}  // namespace bulkhead::supervisor
