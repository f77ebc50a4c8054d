// The control socket as clients abuse it: what it answers, what it bounds, whom it never hurts.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/raw_socket.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

const std::string info_request = R"({"jsonrpc":"2.0","id":1,"method":"daemon.info"})"
                                 "\n";

UniqueFd raw_connection(const Daemon& daemon) { return test::raw_connection(daemon.socket()); }

class ControlSocket : public ::testing::Test {
protected:
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};

    void expect_unhurt() { EXPECT_TRUE(daemon.call("daemon.info")); }
};

TEST_F(ControlSocket, AnswersSocatByHand) {
    const auto finished = run({"socat", "-t5", "-", "UNIX-CONNECT:" + daemon.socket().string()}, {}, info_request);

    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    const auto answer = json::parse(finished.out);
    EXPECT_EQ(answer.at("id").as_int64(), 1);
    EXPECT_EQ(answer.at("result").at("keeper_pid").as_int64(), daemon.keeper().pid());
    EXPECT_EQ(answer.at("result").at("socket").as_string(), daemon.socket().string());
}

TEST_F(ControlSocket, IsOfItsOwnerAlone) {
    struct stat directory {
    }, socket{};
    ASSERT_EQ(::stat(daemon.runtime_directory().c_str(), &directory), 0);
    ASSERT_EQ(::stat(daemon.socket().c_str(), &socket), 0);

    EXPECT_EQ(directory.st_mode & 07777, 0700u);
    EXPECT_EQ(socket.st_mode & 07777, 0600u);
}

TEST_F(ControlSocket, AnswersGarbageWithAnErrorAndGoesOn) {
    const auto socket = raw_connection(daemon);

    send_text(socket, "GET / HTTP/1.1\n");
    const auto refusal = json::parse(read_line(socket));
    send_text(socket, info_request);

    EXPECT_EQ(refusal.at("error").at("code").as_int64(), -32700);
    EXPECT_TRUE(refusal.at("id").is_null());
    EXPECT_THAT(read_line(socket), HasSubstr("keeper_pid"));
}

TEST_F(ControlSocket, RefusesWhatIsNoRequest) {
    const auto socket = raw_connection(daemon);
    const std::vector<std::pair<std::string, int>> cases{
        {R"([{"jsonrpc":"2.0","id":1,"method":"daemon.info"}])", -32600},
        {R"({"id":1,"method":"daemon.info"})", -32600},
        {R"({"jsonrpc":"2.0","id":1,"method":7})", -32600},
        {R"({"jsonrpc":"2.0","id":1,"method":"fleet.destroy"})", -32601},
        {R"({"jsonrpc":"2.0","id":1,"method":"model.load","params":[1]})", -32602},
        {R"({"jsonrpc":"2.0","id":1,"method":"model.load","params":{"model":7}})", -32602},
        {R"({"jsonrpc":"2.0","id":1,"method":"model.load"})", -32602},
        {"42", -32600},
    };
    for (const auto& [request, code] : cases) {
        send_text(socket, request + "\n");
        const auto answer = json::parse(read_line(socket));
        EXPECT_EQ(answer.at("error").at("code").as_int64(), code) << request;
        EXPECT_FALSE(answer.at("error").at("data").at("attempt").as_string().empty()) << request;
    }
    expect_unhurt();
}

TEST_F(ControlSocket, NamesTheKnownModelsWhenOneIsUnknown) {
    const auto result = daemon.load("ecko");

    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::model_unknown);
    EXPECT_THAT(result.error().text(), HasSubstr("ecko"));
    EXPECT_THAT(result.error().remedy, HasSubstr("echo"));
}

TEST_F(ControlSocket, ClosesAConnectionWhoseLineIsTooLong) {
    const auto socket = raw_connection(daemon);

    send_text(socket, std::string(64 * 1024 + 1, 'x'));

    EXPECT_EQ(error_code_of(read_line(socket)), "protocol_violation");
    EXPECT_TRUE(closed_by_peer(socket));
    expect_unhurt();
}

TEST_F(ControlSocket, TakesALineOfExactlyTheBound) {
    const auto socket = raw_connection(daemon);
    std::string request = info_request.substr(0, info_request.size() - 2) + R"(,"params":{"pad":")";
    request += std::string(64 * 1024 - request.size() - 4, 'x') + "\"}}\n";
    ASSERT_EQ(request.size(), 64u * 1024);

    send_text(socket, request);

    EXPECT_THAT(read_line(socket), HasSubstr("\"id\":1"));
}

TEST_F(ControlSocket, DropsHalfALineThatNeverEndsAndOthersDoNotWait) {
    const auto silent = raw_connection(daemon);
    send_text(silent, R"({"jsonrpc":"2.0","id":1,)");

    expect_unhurt();

    EXPECT_EQ(error_code_of(read_line(silent, 20'000)), "deadline_exceeded");
    EXPECT_TRUE(closed_by_peer(silent));
    expect_unhurt();
}

TEST_F(ControlSocket, SurvivesTenThousandConnections) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());
    const std::size_t fds_before = open_fds(supervisor);

    std::size_t opened = 0;
    {
        std::vector<UniqueFd> held;
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        daemon.socket().string().copy(address.sun_path, sizeof address.sun_path - 1);
        for (int i = 0; i < 10'000; ++i) {
            // Non-blocking: a full backlog refuses, which is an answer too.
            UniqueFd socket{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
            if (!socket) break;
            if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) ++opened;
            held.push_back(std::move(socket));
        }
        EXPECT_TRUE(is_alive(supervisor));
    }
    expect_unhurt();

    EXPECT_GT(opened, 100u);
    EXPECT_TRUE(is_alive(supervisor));
    EXPECT_LE(open_fds(supervisor), fds_before + 8);
}

TEST_F(ControlSocket, RefusesASecondDaemon) {
    const auto fleet_file = daemon.folder().write("second.yaml", fleet({test_model("echo", "echo.pt")}));

    const auto second = run({program("bulkheadd"), "--socket", daemon.socket(), fleet_file});

    EXPECT_EQ(second.exit_code, 1);
    EXPECT_THAT(second.err, HasSubstr("already_running"));
    expect_unhurt();
}

TEST(ControlSocketPath, ReplacesAStaleSocket) {
    TemporaryFolder folder;
    const auto directory = folder.path() / "run";
    std::filesystem::create_directory(directory);
    std::filesystem::permissions(directory, std::filesystem::perms::owner_all);
    const auto socket = directory / "control.sock";
    {
        UniqueFd dead{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        socket.string().copy(address.sun_path, sizeof address.sun_path - 1);
        ASSERT_EQ(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    }
    const auto fleet_file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));

    const auto up = run({program("bulkhead"), "--socket", socket, "up", fleet_file});
    EXPECT_EQ(up.exit_code, 0) << up.err;
    EXPECT_EQ(run({program("bulkhead"), "--socket", socket, "down"}).exit_code, 0);
    EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST(ControlSocketPath, RefusesASymlinkedDirectory) {
    TemporaryFolder folder;
    std::filesystem::create_directory(folder.path() / "elsewhere");
    std::filesystem::create_directory_symlink(folder.path() / "elsewhere", folder.path() / "run");
    const auto fleet_file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));

    const auto finished = run({program("bulkheadd"), "--socket", folder.path() / "run/control.sock", fleet_file});

    EXPECT_EQ(finished.exit_code, 1);
    EXPECT_THAT(finished.err, HasSubstr("symlink"));
}

}  // namespace
}  // namespace bulkhead::test
