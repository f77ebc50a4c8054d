/// bulkhead-worker itself, with a model that misbehaves, and the test in the daemon's place.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/support/worker/loop_harness.h"
#include "tests/support/worker/page_reader.h"
#include "tests/unit/worker/model_fixture.h"

namespace bulkhead::worker {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class WorkerProcess : public testing::Test {
protected:
    test::TemporaryFolder folder;
    UniqueFd link;
    UniqueFd log;  ///< its standard error
    pid_t pid = -1;
    std::optional<test::PageReader> page;
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);

    void SetUp() override { SKIP_WITHOUT(test::test_models() / "evil.pt2"); }
    ~WorkerProcess() override {
        if (pid <= 0) return;
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
    }

    /// The worker has said hello, and loads the evil model.
    void start(const char* at_load, const char* at_run) {
        auto [daemon_end, worker_end] = PacketPair::make().value();
        std::array<int, 2> pipe{};
        ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
        pid = ::fork();
        if (pid == 0) {
            const rlimit no_core{};
            ::setrlimit(RLIMIT_CORE, &no_core);
            ::setenv("BULKHEAD_WORKER", "token:evil/0#1", 1);
            ::setenv("BULKHEAD_CACHE", (folder.path() / "cache").c_str(), 1);
            ::setenv("EVIL_LOAD", at_load, 1);
            ::setenv("EVIL_RUN", at_run, 1);
            ::dup2(pipe[1], STDERR_FILENO);
            ::dup2(worker_end.get(), 3);
            const char* const program = BULKHEAD_BINARY_DIR "/bin/bulkhead-worker";
            ::execl(program, program, nullptr);
            ::_exit(127);
        }
        link = std::move(daemon_end);
        log = UniqueFd{pipe[0]};
        ::close(pipe[1]);
        ASSERT_TRUE(expect_said("hello").at("page").as_bool());
        page.emplace(brought.at(0).get());

        config::MethodSpec forward;
        forward.name = "forward";
        forward.inputs = {test::tensor_spec("x", {{1, 16}})};
        forward.outputs = {test::tensor_spec("y", {{1, 16}})};
        const auto spec =
            test::model_spec(config::Runtime::aoti, test::test_models() / "evil.pt2", {std::move(forward)});
        say({{"type", "configure"}, {"protocol", 1}, {"device", "cpu"}, {"model", config::to_json(spec)}});
    }
    void start_ready(const char* at_run) {
        start("ok", at_run);
        expect_said("ready");
    }
    /// A request that provokes it.
    void provoke() {
        auto [client_end, worker_end] = PacketPair::make().value();
        say({{"type", "channel"}, {"channel", 1}, {"client_pid", 1}, {"client_uid", 0}}, worker_end.get());
        worker_end.reset();
        client.emplace(std::move(client_end), 1);
        client->open();
        client->infer(1, "forward", {client->tensor({1, 2, 3, 4})});
    }
    void say(const boost::json::object& message, int fd = -1) {
        ASSERT_TRUE(send_packet(link.get(), boost::json::serialize(message), {&fd, fd >= 0 ? 1U : 0U}));
    }
    boost::json::object expect_said(std::string_view type) {
        while (test::readable_within(link.get(), test::patience)) {
            Packet packet;
            const auto outcome = receive_packet(link.get(), buffer, packet, 0, packet_fds_kernel_max);
            if (!outcome || *outcome != ReceiveOutcome::packet) break;
            brought = std::move(packet.fds);
            const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
            boost::json::object message = boost::json::parse(text).as_object();
            if (message.at("type").as_string() == type) return message;
        }
        ADD_FAILURE() << "the worker never said " << type << "; its log: " << logged;
        return {{"frames", boost::json::array{}}, {"page", false}, {"thread", ""}};
    }
    /// Reads its log until these words have come.
    void await_logged(std::string_view words) {
        std::array<char, 4096> part;
        while (logged.find(words) == logged.npos && test::readable_within(log.get(), test::patience)) {
            const ssize_t count = ::read(log.get(), part.data(), part.size());
            if (count <= 0) break;
            logged.append(part.data(), static_cast<std::size_t>(count));
        }
        ASSERT_THAT(logged, HasSubstr(words));
    }
    int signal_that_ended_it() {
        const UniqueFd pidfd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
        if (!test::readable_within(pidfd.get(), test::patience)) {
            ADD_FAILURE() << "it lives on; its log: " << logged;
            ::kill(pid, SIGKILL);
        }
        int status = 0;
        EXPECT_EQ(::waitpid(pid, &status, 0), pid);
        pid = -1;
        return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    }
    static std::string frames_of(const boost::json::object& backtrace) {
        return boost::json::serialize(backtrace.at("frames"));
    }

    std::vector<UniqueFd> brought;
    std::string logged;
    std::optional<test::TestClient> client;
};

TEST_F(WorkerProcess, AFaultInAnInferenceIsToldWithItsPlaceAndItsRequest) {
    start_ready("segv");
    provoke();

    expect_said("dying");
    const auto backtrace = expect_said("backtrace");

    EXPECT_EQ(backtrace.at("thread").as_string(), "executor");
    EXPECT_THAT(std::string{backtrace.at("frames").as_array().at(0).as_string()}, HasSubstr("(evil_segv+0x"));
    EXPECT_THAT(frames_of(backtrace), HasSubstr("bulkhead-worker(_ZN")) << "the program's own functions have names";
    EXPECT_EQ(signal_that_ended_it(), SIGSEGV);
    const test::SeenPage last = page->read();
    EXPECT_STREQ(last.request.data(), "forward(x float32[4])");
    EXPECT_NE(last.running_since_ns, 0U) << "it never ended";
}

TEST_F(WorkerProcess, AnOverflowOfTheModelsStackIsToldToo) {
    start_ready("stack_overflow");
    provoke();

    EXPECT_THAT(frames_of(expect_said("backtrace")), HasSubstr("(evil_recursion+0x"));
    EXPECT_EQ(signal_that_ended_it(), SIGSEGV);
}

struct Hang {
    const char* how;
    const char* function;
    bool at_load;
    friend void PrintTo(const Hang& each, std::ostream* out) { *out << each.how; }
};
class Hanging : public WorkerProcess, public testing::WithParamInterface<Hang> {};

TEST_P(Hanging, IsToldByTheThreadThatHangsWhenAskedFromOutside) {
    const auto& [how, function, at_load] = GetParam();
    if (at_load) {
        start(how, "ok");
    } else {
        start_ready(how);
        provoke();
    }
    await_logged(fmt::format("evil: {}", how));
    // The handler that handed the model its work is over.
    for (const auto until = std::chrono::steady_clock::now() + test::patience; !test::sleeps(pid);) {
        ASSERT_LT(std::chrono::steady_clock::now(), until);
        std::this_thread::yield();
    }

    ASSERT_EQ(::kill(pid, SIGABRT), 0);
    expect_said("dying");
    const auto backtrace = expect_said("backtrace");

    EXPECT_EQ(backtrace.at("thread").as_string(), "executor");
    EXPECT_THAT(frames_of(backtrace), AllOf(HasSubstr("evil"), HasSubstr(function)));
    EXPECT_EQ(signal_that_ended_it(), SIGABRT);
    EXPECT_STREQ(page->read().request.data(), at_load ? "loading evil.wrapper.so" : "forward(x float32[4])");
}

INSTANTIATE_TEST_SUITE_P(Each, Hanging,
                         testing::Values(Hang{"spin", "evil_spin", false}, Hang{"spin", "evil_spin", true},
                                         Hang{"deadlock", "evil_deadlock", false},
                                         Hang{"ignore_sigterm", "evil_ignore_sigterm", false}),
                         [](const auto& each) {
                             return fmt::format("{}{}", each.param.how, each.param.at_load ? "AtLoad" : "");
                         });

TEST_F(WorkerProcess, AnIdleOneAskedFromOutsideTellsToo) {
    start_ready("ok");

    ASSERT_EQ(::kill(pid, SIGABRT), 0);
    expect_said("dying");

    EXPECT_THAT(frames_of(expect_said("backtrace")), Not(HasSubstr("evil")));
    EXPECT_EQ(signal_that_ended_it(), SIGABRT);
}

TEST_F(WorkerProcess, ItsWordShowsAKillThoughAGrandchildHoldsItsDescriptors) {
    start("setsid_child", "ok");
    expect_said("ready");

    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    EXPECT_TRUE(page->await_death(20s));
    EXPECT_EQ(signal_that_ended_it(), SIGKILL);
    EXPECT_FALSE(test::readable_within(link.get(), 0ms)) << "no end of file while somebody holds the link";

    await_logged(" is the grandchild\n");
    int grandchild = 0;
    ASSERT_EQ(std::sscanf(logged.c_str() + logged.find("pid "), "pid %d", &grandchild), 1);
    EXPECT_EQ(::kill(grandchild, SIGKILL), 0) << "it was gone";
}

}  // namespace
}  // namespace bulkhead::worker
