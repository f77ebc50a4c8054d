// Faults 1 to 5: what arrives on the sockets, and who sends it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tests/faults/raw_channel.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/raw_socket.h"
#include "tests/support/resident_kib.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string info_request = R"({"jsonrpc":"2.0","id":1,"method":"daemon.info"})"
                                 "\n";

TEST(Fault01, AZeroLengthFrameIsIgnoredAndCounted) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    EXPECT_TRUE(client.send({}));
    client.greet();

    for (int i = 0; i < 9; ++i) EXPECT_TRUE(client.send({}));
    client.expect_served(1);

    EXPECT_EQ(daemon.row("echo").at("ignored_frames").as_int64(), 10);
    const auto line = raw_connection(daemon.socket());
    send_text(line, "\n\n\r\n" + info_request);
    EXPECT_THAT(read_line(line), HasSubstr("keeper_pid")) << "an empty line is nothing, too";
}

TEST(Fault02, ALengthOfAllOnesClosesTheChannelBeforeAnythingIsAllocated) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel other{daemon, "echo"};
    other.greet();
    other.expect_served(1);
    const pid_t worker = daemon.pid("echo");
    const std::int64_t before = resident_kib(worker);
    RawChannel liar{daemon, "echo"};
    liar.greet();
    const std::int64_t opened = resident_kib(worker);

    liar.send(bytes_of(
        {wire::magic, wire::version, static_cast<std::uint16_t>(wire::MessageType::infer), 0xFFFFFFFFU, 0, 1, 0}));

    EXPECT_EQ(liar.expect_error().code, ErrorCode::protocol_violation);
    liar.expect_end();
    other.expect_served(2);
    EXPECT_LT(resident_kib(worker), std::max(before, opened) + 16 * 1024) << "KiB resident; 4 GiB were claimed";
}

TEST(Fault03, HalfAFrameThenSilenceCostsItsSenderTheConnectionAndNobodyElseAnything) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const auto silent = raw_connection(daemon.socket());
    RawChannel mute{daemon, "echo"};
    send_text(silent, R"({"jsonrpc":"2.0","id":1,)");

    for (int i = 0; i < 20; ++i) EXPECT_TRUE(daemon.call("daemon.info"));
    RawChannel client{daemon, "echo"};
    client.greet();
    for (std::uint64_t id = 1; id <= 20; ++id) client.expect_served(id);

    EXPECT_EQ(error_code_of(read_line(silent, 20'000)), "deadline_exceeded");
    EXPECT_TRUE(closed_by_peer(silent));
    mute.expect_end();  // a channel on which no hello came
    client.expect_served(21);
}

TEST(Fault04, TenThousandConnectionsAndSlowReadersMeetTheirBounds) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    client.greet();
    const pid_t supervisor = supervisor_of(daemon);
    const auto first = raw_connection(daemon.socket());
    send_text(first, info_request);
    ASSERT_THAT(read_line(first), HasSubstr("keeper_pid"));
    const std::size_t fds_before = open_fds(supervisor);
    const std::int64_t memory_before = resident_kib(supervisor);

    {
        std::vector<UniqueFd> held;
        for (int i = 0; i < 10'000; ++i) {
            UniqueFd one = raw_connection(daemon.socket(), true);  // a full backlog refuses, which is an answer too
            if (one && held.size() < 4'000) held.push_back(std::move(one));
        }
        send_text(first, info_request);
        EXPECT_THAT(read_line(first), HasSubstr("keeper_pid")) << "who was there before is served";
        client.expect_served(1);
        EXPECT_LE(open_fds(supervisor), fds_before + 1'100) << "a share of a user: 1,000 connections";
    }
    // Asks for ever and never reads: its answers wait for it up to a bound, then it is closed.
    const auto slow = raw_connection(daemon.socket(), true);
    ASSERT_TRUE(slow);
    bool was_closed = false;
    for (int i = 0; i < 1'000'000 && !was_closed; ++i) {
        const ssize_t sent = ::send(slow.get(), info_request.data(), info_request.size(), MSG_NOSIGNAL);
        if (sent >= 0) continue;
        was_closed = errno == EPIPE || errno == ECONNRESET;
        pollfd entry{slow.get(), POLLOUT, 0};
        ASSERT_TRUE(was_closed || ::poll(&entry, 1, 20'000) == 1) << "the daemon neither reads nor closes";
    }

    EXPECT_TRUE(was_closed);
    EXPECT_TRUE(daemon.call("daemon.info"));
    client.expect_served(2);
    EXPECT_LT(resident_kib(supervisor), memory_before + 64 * 1024);
}

TEST(Fault05, AForeignUserAndAnAbstractAddressFindNobody) {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be somebody else for a moment";
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    const auto as_nobody = [&] {  // 0 refused by the file system, 1 told not_permitted, 2 served
        const pid_t child = ::fork();
        if (child == 0) {
            if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
            const auto socket = raw_connection(daemon.socket());
            if (!socket) ::_exit(0);
            send_text(socket, info_request);
            ::_exit(read_line(socket).find("not_permitted") != std::string::npos ? 1 : 2);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        return WEXITSTATUS(status);
    };

    EXPECT_EQ(as_nobody(), 0);
    ::chmod(daemon.folder().path().c_str(), 0755);
    ::chmod(daemon.runtime_directory().c_str(), 0755);
    ::chmod(daemon.socket().c_str(), 0666);
    EXPECT_EQ(as_nobody(), 1) << "also where somebody opened the folder, the peer's uid decides";

    std::ifstream sockets{"/proc/net/unix"};
    for (std::string line; std::getline(sockets, line);)
        EXPECT_THAT(line, Not(HasSubstr("@" + daemon.socket().string().substr(1)))) << "an abstract name";
    EXPECT_EQ(run({program("bulkhead"), "--socket", "@" + daemon.socket().string(), "info"}).exit_code, 3);
    EXPECT_TRUE(daemon.call("daemon.info"));
}

}  // namespace
}  // namespace bulkhead::test
