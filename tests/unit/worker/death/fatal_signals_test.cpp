#include "worker/death/fatal_signals.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <future>
#include <thread>

#include <boost/asio/post.hpp>

#include "ipc/links/worker_link.h"
#include "tests/support/worker/loop_harness.h"
#include "worker/loop/executor.h"

namespace bulkhead::worker::test {
namespace {

struct LastWords {
    std::string dying;
    boost::json::object backtrace;
    int signal = 0;

    [[nodiscard]] std::string frames() const { return boost::json::serialize(backtrace.at("frames")); }
};

LastWords last_words_of(void (*die)()) {
    auto [parent_end, child_end] = PacketPair::make().value();
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit no_core{};
        ::setrlimit(RLIMIT_CORE, &no_core);
        const SignalStack stack;
        report_fatal_signals(child_end.get());
        die();
        ::_exit(0);
    }
    child_end.reset();
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    const auto next = [&] {
        const bool came = readable_within(parent_end.get(), patience) &&
                          receive_packet(parent_end.get(), buffer, packet).value() == ReceiveOutcome::packet;
        EXPECT_TRUE(came);
        if (!came) return std::string{"{}"};
        const std::string text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
        EXPECT_EQ(boost::json::parse(text), worker_link::to_json(worker_link::parse_to_daemon(text).value()))
            << "written without the encoder, and yet as worker_link.json declares it";
        return text;
    };
    LastWords words{next(), boost::json::parse(next()).as_object(), 0};
    int status = 0;
    ::waitpid(child, &status, 0);
    words.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return words;
}

__attribute__((noinline)) int recurse_for_ever(int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : recurse_for_ever(depth + 1) + frame[0];
}

__attribute__((noinline)) void divide_by(volatile int* divisor) { *divisor = 100 / *divisor; }

TEST(FatalSignal, IsToldOnTheLinkAndStillEndsTheProcess) {
    const LastWords aborted = last_words_of([] { std::abort(); });
    EXPECT_EQ(aborted.dying, R"({"type":"dying","signal":6})");
    EXPECT_EQ(aborted.signal, SIGABRT);

    const LastWords faulted = last_words_of([] { ::raise(SIGSEGV); });
    EXPECT_EQ(faulted.dying, R"({"type":"dying","signal":11})");
    EXPECT_EQ(faulted.signal, SIGSEGV);
}

TEST(FatalSignal, BringsABacktraceInnermostFirst) {
    const LastWords words = last_words_of([] {
        ::pthread_setname_np(::pthread_self(), "odd \"name\"");
        std::abort();
    });

    EXPECT_EQ(words.backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(words.backtrace.at("signal").as_int64(), SIGABRT);
    EXPECT_EQ(words.backtrace.at("thread").as_string(), "odd \"name\"");
    const std::string frames = words.frames();
    EXPECT_NE(frames.find("libc.so.6(abort+0x"), std::string::npos) << frames;
    EXPECT_LT(frames.find("libc.so.6(abort+0x"), frames.find("libc.so.6(__libc_start_main")) << frames;
    EXPECT_EQ(frames.find('/'), std::string::npos) << "no folders: " << frames;
}

TEST(FatalSignal, StartsWhereTheFaultWas) {
    const LastWords words = last_words_of([] {
        volatile int zero = 0;
        divide_by(&zero);
    });

    EXPECT_EQ(words.signal, SIGFPE);
    const auto& innermost = words.backtrace.at("frames").as_array().at(0).as_string();
    EXPECT_EQ(std::string_view{innermost}.find("libc.so"), std::string_view::npos) << innermost;
}

TEST(FatalSignal, IsToldWhenTheStackOverflowed) {
    const LastWords words = last_words_of([] { (void)recurse_for_ever(1); });

    EXPECT_EQ(words.dying, R"({"type":"dying","signal":11})");
    EXPECT_EQ(words.signal, SIGSEGV);
    EXPECT_EQ(words.backtrace.at("frames").as_array().size(), 48U) << "bounded";
}

TEST(FatalSignal, IsToldByOneThreadWhenSeveralFail) {
    const LastWords words = last_words_of([] {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 8; ++i) threads.emplace_back([] { ::raise(SIGSEGV); });
    });

    EXPECT_EQ(words.dying, R"({"type":"dying","signal":11})");
    EXPECT_EQ(words.backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(words.signal, SIGSEGV);
}

/// The backtrace of a child that another process, this one, aborts once it has said
/// that it is ready.
boost::json::object backtrace_asked_of(void (*live)(int link)) {
    auto [parent_end, child_end] = PacketPair::make().value();
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit no_core{};
        ::setrlimit(RLIMIT_CORE, &no_core);
        report_fatal_signals(child_end.get());
        ::pthread_setname_np(::pthread_self(), "main");
        live(child_end.get());
        for (;;) ::pause();
    }
    child_end.reset();
    boost::json::object last;
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    while (readable_within(parent_end.get(), patience) &&
           receive_packet(parent_end.get(), buffer, packet).value() == ReceiveOutcome::packet) {
        last = boost::json::parse(
                   std::string_view{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()})
                   .as_object();
        if (last.at("type") == "ready") ::kill(child, SIGABRT);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    return last;
}

TEST(FatalSignal, AHangReportIsAboutTheThreadThatIsSuspected) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        std::thread{[link] {
            ::pthread_setname_np(::pthread_self(), "suspect");
            const HangSuspect suspect;
            (void)send_packet(link, R"({"type":"ready"})");
            for (;;) ::pause();
        }}.detach();
    });
    EXPECT_EQ(backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(backtrace.at("thread").as_string(), "suspect");
}

TEST(FatalSignal, AHangReportWithoutASuspectIsAboutWhoeverReceivesIt) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        std::jthread{[] { const HangSuspect no_longer; }};
        (void)send_packet(link, R"({"type":"ready"})");
    });
    EXPECT_EQ(backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(backtrace.at("thread").as_string(), "main");
}

TEST(FatalSignal, AHangReportWithoutASuspectIsNotAboutAThreadThatHappensToReceiveIt) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        sigset_t
            it;  // the main thread does not take it until the other one has: the kernel chooses who
                 // does not block it
        ::sigemptyset(&it);
        ::sigaddset(&it, SIGABRT);
        ::pthread_sigmask(SIG_BLOCK, &it, nullptr);
        std::thread{[link, it] {
            ::pthread_setname_np(::pthread_self(), "bystander");
            ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
            (void)send_packet(link, R"({"type":"ready"})");
            for (;;) ::pause();
        }}.detach();
        for (sigset_t pending;;) {
            ::sigpending(&pending);
            if (::sigismember(&pending, SIGABRT) == 1) break;  // it was handed on
            ::usleep(1'000);
        }
        ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
    });
    EXPECT_EQ(backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(backtrace.at("thread").as_string(), "main");
}

/// A worker's loop in the child, whose main thread is the cover.
struct HangingLoop {
    explicit HangingLoop(int link_end) : link{link_end} {}
    void hang() const {
        (void)send_packet(link, R"({"type":"ready"})");
        for (;;) ::pause();
    }
    void post(std::function<void()> handler) { boost::asio::post(io, HandlerLock::of(io).wrap(std::move(handler))); }
    int link;
    boost::asio::io_context io;
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{io.get_executor()};
    Executor executor{io};
};

TEST(FatalSignal, AHangOfAHandlerIsReportedByTheThreadThatRunsTheLoop) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        HangingLoop loop{link};
        loop.post([&] { loop.hang(); });
        loop.executor.run();
    });
    EXPECT_EQ(backtrace.at("thread").as_string(), "executor");
}

TEST(FatalSignal, AHangOfTheModelIsReportedByItsThreadWhileTheOtherRunsTheLoop) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        HangingLoop loop{link};
        loop.executor.post([&]() -> Executor::Then {
            boost::asio::post(loop.io, [&] { (void)send_packet(loop.link, R"({"type":"ready"})"); });
            for (;;) ::pause();
        });
        loop.executor.run();
    });
    EXPECT_EQ(backtrace.at("thread").as_string(), "executor");
}

TEST(FatalSignal, AHangOfAHandlerWhileTheModelRunsIsReportedByTheCover) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        HangingLoop loop{link};
        loop.executor.post([&]() -> Executor::Then {
            loop.post([&] { loop.hang(); });
            for (;;) ::pause();
        });
        loop.executor.run();
    });
    EXPECT_EQ(backtrace.at("thread").as_string(), "main");
}

TEST(FatalSignal, AHangOfAHandlerThatTheCoverRunsIsReportedByTheCover) {
    const boost::json::object backtrace = backtrace_asked_of([](int link) {
        HangingLoop loop{link};
        std::promise<void> covered;
        std::atomic<pid_t> model_thread{0};
        loop.executor.post([&]() -> Executor::Then {
            covered.get_future().wait();
            model_thread = own_thread();
            return [] {};
        });
        loop.post([&] {  // only the cover comes to this before the job ends
            covered.set_value();
            while (model_thread == 0 || !sleeps(model_thread)) std::this_thread::yield();
            loop.hang();
        });
        loop.executor.run();
    });
    EXPECT_EQ(backtrace.at("thread").as_string(), "main");
}

TEST(FatalSignal, EndsTheProcessThoughTheLinkIsFullAndNobodyReads) {
    auto [parent_end, child_end] = PacketPair::make(true).value();
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit no_core{};
        ::setrlimit(RLIMIT_CORE, &no_core);
        while (send_packet(child_end.get(), "full")) {
        }
        report_fatal_signals(child_end.get());
        std::abort();
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

}  // namespace
}  // namespace bulkhead::worker::test
