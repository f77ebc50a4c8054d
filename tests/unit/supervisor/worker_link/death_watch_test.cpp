#include "supervisor/worker_link/death_watch.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <limits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "ipc/base/pidfd.h"
#include "supervisor/base/proc_files.h"
#include "tests/unit/supervisor/loop.h"
#include "tests/unit/supervisor/page_owner.h"

namespace bulkhead::supervisor {
namespace {

using test::PageOwner;
using test::WritablePage;
using testing::HasSubstr;

std::shared_ptr<const WorkerPageView> view(test::WritablePage& page) {
    return WorkerPageView::map(page.memfd()).value();
}

class DeathWatchTest : public testing::Test {
protected:
    DeathWatchTest() {
        if (!DeathWatch::is_supported()) skip_ = "this kernel has no futex_waitv()";
    }
    void SetUp() override {
        if (skip_ != nullptr) GTEST_SKIP() << skip_;
    }
    bool wait(const std::function<bool()>& done) { return test::run_until(io_, done); }
    /// Names of this process' threads.
    static std::size_t watching_threads() {
        std::size_t count = 0;
        for (const auto& task : std::filesystem::directory_iterator{"/proc/self/task"})
            count +=
                read_proc_file(static_cast<pid_t>(std::stoi(task.path().filename())), "comm", 64) == "death-watch\n";
        return count;
    }

    boost::asio::io_context io_;
    const char* skip_ = nullptr;
};

TEST_F(DeathWatchTest, TellsOnceThatAWordsOwnerDied) {
    DeathWatch death_watch{io_};
    PageOwner owner;
    PageOwner other;
    int deaths = 0;
    int other_deaths = 0;
    const auto watch = death_watch.watch(view(owner.page()), [&] { ++deaths; });
    const auto other_watch = death_watch.watch(view(other.page()), [&] { ++other_deaths; });

    owner.die();
    ASSERT_TRUE(wait([&] { return deaths > 0; }));
    other.die();
    ASSERT_TRUE(wait([&] { return other_deaths > 0; }));

    EXPECT_EQ(deaths, 1);
    EXPECT_EQ(other_deaths, 1);

    bool was_dead = false;
    const auto late_watch = death_watch.watch(view(owner.page()), [&] { was_dead = true; });
    EXPECT_FALSE(was_dead) << "never within the call";
    EXPECT_TRUE(wait([&] { return was_dead; }));
}

TEST_F(DeathWatchTest, ReportsAKilledProcessBeforeItsPidfdIsReadable) {
    constexpr std::size_t resident_bytes = 512 << 20;
    WritablePage page;
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    const pid_t child = ::fork();
    if (child == 0) {
        void* bytes =
            ::mmap(nullptr, resident_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        page.hold();
        (void)!::write(pipe[1], &bytes, 1);
        while (true) ::pause();
    }
    char ready = 0;
    ASSERT_EQ(::read(pipe[0], &ready, 1), 1);
    ::close(pipe[0]);
    ::close(pipe[1]);
    const UniqueFd pidfd = pidfd_of(child);
    DeathWatch death_watch{io_};
    bool died = false;
    bool was_reapable = true;
    const auto watch = death_watch.watch(view(page), [&] {
        died = true;
        was_reapable = has_ended(pidfd);
    });

    ::kill(child, SIGKILL);

    EXPECT_TRUE(wait([&] { return died; }));
    EXPECT_FALSE(was_reapable);
    ::waitpid(child, nullptr, 0);
}

TEST_F(DeathWatchTest, ADroppedWatchTellsNothingAndLetsItsPageGo) {
    DeathWatch death_watch{io_};
    PageOwner owner;
    PageOwner other;
    bool died = false;
    bool other_died = false;
    auto page = view(owner.page());
    const std::weak_ptr<const WorkerPageView> mapping = page;
    auto watch = death_watch.watch(std::move(page), [&] { died = true; });
    const auto other_watch = death_watch.watch(view(other.page()), [&] { other_died = true; });

    watch.reset();
    EXPECT_TRUE(wait([&] { return mapping.expired(); }));
    owner.die();
    other.die();

    ASSERT_TRUE(wait([&] { return other_died; }));
    EXPECT_FALSE(died);
}

TEST_F(DeathWatchTest, MoreWordsThanOneCallTakesAreWatchedByMoreThreads) {
    EXPECT_EQ(watching_threads(), 0U);
    {
        DeathWatch death_watch{io_};
        EXPECT_EQ(watching_threads(), 0U) << "before anybody is watched";
        std::vector<std::unique_ptr<PageOwner>> owners;
        std::vector<std::shared_ptr<DeathWatch::Watch>> watches;
        std::size_t deaths = 0;
        for (int i = 0; i < 300; ++i) {
            owners.push_back(std::make_unique<PageOwner>());
            watches.push_back(death_watch.watch(view(owners.back()->page()), [&] { ++deaths; }));
        }
        EXPECT_TRUE(wait([] { return watching_threads() == 3; }));

        for (const auto& owner : owners) owner->die();

        EXPECT_TRUE(wait([&] { return deaths == owners.size(); })) << deaths;
    }
    EXPECT_EQ(watching_threads(), 0U);
}

TEST_F(DeathWatchTest, AWordThatIsWrittenByOthersOrWokenAgainAndAgainIsWatchedNoLonger) {
    DeathWatch death_watch{io_};
    PageOwner honest;
    bool died = false;
    const auto watch = death_watch.watch(view(honest.page()), [&] { died = true; });
    for (const bool writes : {true, false}) {
        PageOwner liar;
        auto page = view(liar.page());
        const std::weak_ptr<const WorkerPageView> mapping = page;
        const auto liars_watch = death_watch.watch(std::move(page), [] { ADD_FAILURE(); });

        const std::uint32_t before = *liar.page().word();
        if (writes) __atomic_store_n(liar.page().word(), 7, __ATOMIC_RELEASE);
        bool woken = false;
        EXPECT_TRUE(wait([&] {
            if (!std::exchange(woken, writes))
                ::syscall(SYS_futex, liar.page().word(), FUTEX_WAKE, 1, nullptr, nullptr, 0);
            return mapping.expired();
        }));
        __atomic_store_n(liar.page().word(), before, __ATOMIC_RELEASE);
    }
    honest.die();

    EXPECT_TRUE(wait([&] { return died; })) << "its neighbour is watched on";
}

TEST_F(DeathWatchTest, CanEndWhileItsThreadsSleepAndWatchesOutliveIt) {
    PageOwner owner;
    auto death_watch = std::make_unique<DeathWatch>(io_);
    auto watch = death_watch->watch(view(owner.page()), [] { ADD_FAILURE(); });
    death_watch.reset();
    owner.die();
    watch.reset();
    io_.run();
}

/// As a container's filter does that was written before Linux 5.16.
void refuse_futex_waitv(std::uint32_t error) {
    std::array<sock_filter, 4> program{{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_futex_waitv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    }};
    const sock_fprog filter{program.size(), program.data()};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
        ::_exit(3);
}

TEST(DeathWatchWithoutFutexWaitv, SaysSoAndStartsNothing) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    for (const std::uint32_t error : {ENOSYS, EPERM})
        EXPECT_EXIT(
            {
                refuse_futex_waitv(error);
                boost::asio::io_context io;
                DeathWatch death_watch{io};
                PageOwner owner;
                bool died = false;
                const auto watch = death_watch.watch(view(owner.page()), [&] { died = true; });
                owner.die();
                io.run();
                ::_exit(DeathWatch::is_supported() || died ? 1 : 0);
            },
            testing::ExitedWithCode(0), "");
}

TEST(WorkerPage, TellsWhatRuns) {
    PageOwner owner;
    owner.page().page().steps = 7;
    owner.page().runs("forward(x \x1b[1m f32[1])", 12'345);

    const auto page = view(owner.page());

    EXPECT_EQ(page->steps(), 7U);
    EXPECT_EQ(page->running_since_ns(), 12'345U);
    EXPECT_EQ(page->request(), "forward(x \\x1b[1m f32[1])");
    EXPECT_FALSE(page->owner_died());
    owner.page().page().request.fill('x');
    EXPECT_EQ(page->request().size(), worker_page::request_text_bytes) << "without an end, it is bounded";
    ++owner.page().page().request_sequence;
    EXPECT_EQ(page->request(), "") << "words that are being written are none";
    owner.page().page().running_since_ns = std::numeric_limits<std::uint64_t>::max();
    EXPECT_EQ(page->running_since_ns(), 0U) << "a start in the future is none";
}

std::string refusal(const UniqueFd& fd) {
    const auto page = WorkerPageView::map(fd);
    return page ? "accepted" : page.error().text();
}

TEST(WorkerPage, WhatIsNoSealedPageWithAHeldWordIsRefused) {
    EXPECT_THAT(refusal(UniqueFd{}), HasSubstr("not a memfd of one page"));
    EXPECT_THAT(refusal(UniqueFd{::open("/dev/zero", O_RDWR)}), HasSubstr("not a memfd of one page"));
    const UniqueFd empty{::memfd_create("empty", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    EXPECT_THAT(refusal(empty), HasSubstr("not a memfd of one page"));
    const UniqueFd unsealed{::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    ASSERT_EQ(::ftruncate(unsealed.get(), worker_page::page_bytes), 0);
    EXPECT_THAT(refusal(unsealed), HasSubstr("not sealed"));

    WritablePage page;
    EXPECT_THAT(refusal(page.memfd()), HasSubstr("magic"));
    page.page().magic_number = worker_page::magic;
    EXPECT_THAT(refusal(page.memfd()), HasSubstr("would wake nobody"));
}

}  // namespace
}  // namespace bulkhead::supervisor
