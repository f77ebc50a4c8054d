// The control socket without a library, and who may use it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

TEST(ControlSocket, AnswersSocatByHand) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};

    const auto finished = run({"socat", "-t5", "-", "UNIX-CONNECT:" + daemon.socket().string()}, {},
                              "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.info\"}\n");

    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    const auto answer = boost::json::parse(finished.out);
    EXPECT_EQ(answer.at("id").as_int64(), 1);
    EXPECT_EQ(answer.at("result").at("keeper_pid").as_int64(), daemon.keeper().pid());
    EXPECT_EQ(answer.at("result").at("socket").as_string(), daemon.socket().string());
}

TEST(ControlSocket, IsOfItsOwnerAlone) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    struct stat directory {
    }, socket{};
    ASSERT_EQ(::stat(daemon.runtime_directory().c_str(), &directory), 0);
    ASSERT_EQ(::stat(daemon.socket().c_str(), &socket), 0);

    EXPECT_EQ(directory.st_mode & 07777, 0700u);
    EXPECT_EQ(socket.st_mode & 07777, 0600u);
}

}  // namespace
}  // namespace bulkhead::test
