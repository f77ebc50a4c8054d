// Fault 5: who may connect.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/raw_socket.h"

namespace bulkhead::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string info_request = R"({"jsonrpc":"2.0","id":1,"method":"daemon.info"})"
                                 "\n";

TEST(Fault05, AForeignUserAndAnAbstractAddressFindNobody) {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be somebody else for a moment";
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    const auto as_nobody = [&] {  // 0 refused by the file system, 1 told not_permitted, 2 served
        const pid_t child = ::fork();
        if (child == 0) {
            if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
            const auto socket = unix_client(daemon.socket());
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
