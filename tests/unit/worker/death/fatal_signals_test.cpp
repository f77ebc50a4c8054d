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
#include <fmt/format.h>

#include "ipc/links/worker_link.h"
#include "tests/support/worker/loop_harness.h"
#include "worker/loop/executor.h"

namespace bulkhead::worker::test {
namespace {

/// A child that runs `live` with the handlers installed, and what it says on its link.
class Child {
public:
    explicit Child(void (*live)(int link), bool nonblocking = false) {
        auto [parent_end, child_end] = PacketPair::make(nonblocking).value();
        process_ = ::fork();
        if (process_ == 0) {
            const rlimit no_core{};
            ::setrlimit(RLIMIT_CORE, &no_core);
            const SignalStack stack;
            report_fatal_signals(child_end.get());
            ::alarm(60);  // if nothing else ends it
            live(child_end.get());
            for (;;) ::pause();
        }
        link_ = std::move(parent_end);
    }
    /// Empty at its end.
    std::string next() {
        Packet packet;
        if (!readable_within(link_.get(), patience) ||
            receive_packet(link_.get(), buffer_, packet).value() != ReceiveOutcome::packet)
            return {};
        return {reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
    }
    void abort() const { ::kill(process_, SIGABRT); }
    /// The signal that ended it.
    [[nodiscard]] int ended_by() const {
        int status = 0;
        ::waitpid(process_, &status, 0);
        return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    }

private:
    pid_t process_;
    UniqueFd link_;
    std::vector<std::byte> buffer_ = std::vector<std::byte>(packet_bytes_max);
};

/// The backtrace of a child that dies by this signal.
boost::json::object last_words_of(int signal, void (*die)(int link)) {
    Child child{die};
    const std::string dying = child.next(), text = child.next();
    EXPECT_EQ(child.ended_by(), signal);
    EXPECT_EQ(dying, fmt::format(R"({{"type":"dying","signal":{}}})", signal));
    for (const std::string& packet : {dying, text})
        EXPECT_EQ(boost::json::parse(packet), worker_link::to_json(worker_link::parse_to_daemon(packet).value()))
            << "written without the encoder, and yet as worker_link.json declares it";
    boost::json::object backtrace = boost::json::parse(text).as_object();
    EXPECT_EQ(backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(backtrace.at("signal").as_int64(), signal);
    return backtrace;
}

__attribute__((noinline)) int recurse_for_ever(int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : recurse_for_ever(depth + 1) + frame[0];
}

__attribute__((noinline)) void divide_by(volatile int* divisor) { *divisor = 100 / *divisor; }

TEST(FatalSignal, BringsABacktraceInnermostFirst) {
    const boost::json::object backtrace = last_words_of(SIGABRT, [](int) {
        ::pthread_setname_np(::pthread_self(), "odd \"name\"");
        std::abort();
    });

    EXPECT_EQ(backtrace.at("thread").as_string(), "odd \"name\"");
    const std::string frames = boost::json::serialize(backtrace.at("frames"));
    EXPECT_NE(frames.find("libc.so.6(abort+0x"), std::string::npos) << frames;
    EXPECT_LT(frames.find("libc.so.6(abort+0x"), frames.find("libc.so.6(__libc_start_main")) << frames;
    EXPECT_EQ(frames.find('/'), std::string::npos) << "no folders: " << frames;
}

TEST(FatalSignal, StartsWhereTheFaultWas) {
    const boost::json::object backtrace = last_words_of(SIGFPE, [](int) {
        volatile int zero = 0;
        divide_by(&zero);
    });

    const auto& innermost = backtrace.at("frames").as_array().at(0).as_string();
    EXPECT_EQ(std::string_view{innermost}.find("libc.so"), std::string_view::npos) << innermost;
}

TEST(FatalSignal, IsToldWhenTheStackOverflowed) {
    const boost::json::object backtrace = last_words_of(SIGSEGV, [](int) { (void)recurse_for_ever(1); });

    EXPECT_EQ(backtrace.at("frames").as_array().size(), 48U) << "bounded";
}

TEST(FatalSignal, IsToldByOneThreadWhenSeveralFail) {
    last_words_of(SIGSEGV, [](int) {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 8; ++i) threads.emplace_back([] { ::raise(SIGSEGV); });
    });
}

TEST(FatalSignal, EndsTheProcessThoughTheLinkIsFullAndNobodyReads) {
    const Child child{[](int link) {
                          while (send_packet(link, "full")) {
                          }
                          std::abort();
                      },
                      true};
    EXPECT_EQ(child.ended_by(), SIGABRT);
}

/// A worker's loop in the child, whose main thread is the cover.
struct HangingLoop {
    void post(std::function<void()> handler) { boost::asio::post(io, HandlerLock::of(io).wrap(std::move(handler))); }
    boost::asio::io_context io;
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{io.get_executor()};
    Executor executor{io};
};

/// Waits to be aborted by another process, which learns that it may.
void hang_at(int link) {
    (void)send_packet(link, R"({"type":"ready"})");
    for (;;) ::pause();
}

void hang_as_suspect(int link) {
    std::thread{[link] {
        ::pthread_setname_np(::pthread_self(), "suspect");
        const HangSuspect suspect;
        hang_at(link);
    }}.detach();
}

void hang_without_suspect(int link) {
    std::jthread{[] { const HangSuspect no_longer; }};
    hang_at(link);
}

/// The main thread does not take the signal until another one has: the kernel chooses who does not
/// block it.
void hang_beside_a_receiver(int link) {
    sigset_t it;
    ::sigemptyset(&it);
    ::sigaddset(&it, SIGABRT);
    ::pthread_sigmask(SIG_BLOCK, &it, nullptr);
    std::thread{[link, it] {
        ::pthread_setname_np(::pthread_self(), "bystander");
        ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
        hang_at(link);
    }}.detach();
    for (sigset_t pending;;) {
        ::sigpending(&pending);
        if (::sigismember(&pending, SIGABRT) == 1) break;  // it was handed on
        ::usleep(1'000);
    }
    ::pthread_sigmask(SIG_UNBLOCK, &it, nullptr);
}

void hang_in_handler(int link) {
    HangingLoop loop;
    loop.post([&] { hang_at(link); });
    loop.executor.run();
}

void hang_in_model(int link) {
    HangingLoop loop;
    loop.executor.post([&]() -> Executor::Then {
        boost::asio::post(loop.io, [&] { (void)send_packet(link, R"({"type":"ready"})"); });
        for (;;) ::pause();
    });
    loop.executor.run();
}

void hang_in_handler_while_the_model_runs(int link) {
    HangingLoop loop;
    loop.executor.post([&]() -> Executor::Then {
        loop.post([&] { hang_at(link); });
        for (;;) ::pause();
    });
    loop.executor.run();
}

void hang_in_handler_of_the_cover(int link) {
    HangingLoop loop;
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
        hang_at(link);
    });
    loop.executor.run();
}

struct Hang {
    const char* name;
    void (*live)(int link);
    const char* reported_by;
};

class HangReport : public testing::TestWithParam<Hang> {};

TEST_P(HangReport, IsAboutTheThreadThatIsSuspected) {
    Child child{[](int link) {
        ::pthread_setname_np(::pthread_self(), "main");
        GetParam().live(link);
    }};
    std::string last;
    for (std::string text = child.next(); !text.empty(); text = child.next()) {
        if (text == R"({"type":"ready"})") child.abort();
        last = std::move(text);
    }
    EXPECT_EQ(child.ended_by(), SIGABRT);
    const boost::json::object backtrace = boost::json::parse(last).as_object();
    EXPECT_EQ(backtrace.at("type").as_string(), "backtrace");
    EXPECT_EQ(backtrace.at("thread").as_string(), GetParam().reported_by);
}

INSTANTIATE_TEST_SUITE_P(
    Each, HangReport,
    testing::Values(Hang{"Suspect", hang_as_suspect, "suspect"}, Hang{"NoSuspect", hang_without_suspect, "main"},
                    Hang{"AnotherReceives", hang_beside_a_receiver, "main"},
                    Hang{"Handler", hang_in_handler, "executor"}, Hang{"Model", hang_in_model, "executor"},
                    Hang{"HandlerWhileTheModelRuns", hang_in_handler_while_the_model_runs, "main"},
                    Hang{"HandlerOfTheCover", hang_in_handler_of_the_cover, "main"}),
    [](const auto& of) { return std::string{of.param.name}; });

}  // namespace
}  // namespace bulkhead::worker::test
