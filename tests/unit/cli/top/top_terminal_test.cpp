/// `bulkhead top` in a pseudo-terminal: it leaves the terminal as it was, whatever ends it.

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/clients/fake_daemon.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using test::FakeDaemon;
using test::TemporaryFolder;
using testing::EndsWith;
using testing::HasSubstr;

constexpr const char* entered = "\x1b[?1049h";
constexpr const char* left = "\x1b[?1049l";

/// The daemon of `up`'s tests: it answers, and knows no models.
class FakeDaemonProcess {
public:
    explicit FakeDaemonProcess(const std::string& socket) : socket_{socket} {
        pid_ = ::fork();
        if (pid_ != 0) return;
        ::execl(BULKHEAD_FAKE_DAEMON, "fake_daemon", "--socket", socket.c_str(), "answers", nullptr);
        ::_exit(127);
    }
    ~FakeDaemonProcess() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        ::unlink(socket_.c_str());
    }

private:
    std::string socket_;
    pid_t pid_ = 0;
};

/// `bulkhead top` as the one program of a terminal.
class Top {
public:
    explicit Top(const std::string& socket, bool controlling = true) {
        winsize size{24, 80, 0, 0};
        int slave = -1;
        EXPECT_EQ(::openpty(&fd_, &slave, nullptr, nullptr, &size), 0);
        ::tcgetattr(slave, &before_);  // before the program can change it
        pid_ = ::fork();
        if (pid_ == 0) {
            ::close(fd_);
            if (controlling) {
                ::login_tty(slave);
            } else {  // /dev/tty cannot be opened
                ::setsid();
                for (const int standard : {0, 1, 2}) ::dup2(slave, standard);
                ::close(slave);
            }
            // Nohup ignores them.
            for (const int number : {SIGHUP, SIGINT, SIGQUIT}) ::signal(number, SIG_DFL);
            ::setenv("TERM", "xterm-256color", 1);
            ::setenv("LC_ALL", "C.UTF-8", 1);
            ::execl(BULKHEAD_PROGRAM, "bulkhead", "--socket", socket.c_str(), "top", nullptr);
            ::_exit(127);
        }
        ::close(slave);
    }
    ~Top() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, nullptr, 0);
        }
        ::close(fd_);
    }

    void type(std::string_view keys) { ASSERT_EQ(::write(fd_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size())); }
    void signal(int number) { ::kill(pid_, number); }
    void resize(unsigned short columns, unsigned short rows) {
        const winsize size{rows, columns, 0, 0};
        ::ioctl(fd_, TIOCSWINSZ, &size);
    }

    /// What it drew until `text` came, or until the terminal closed, or for 20 s.
    std::string seen(const std::string& text) {
        std::string drawn;
        const auto until = std::chrono::steady_clock::now() + 20s;
        while (drawn.find(text) == std::string::npos && std::chrono::steady_clock::now() < until) {
            pollfd ready{fd_, POLLIN, 0};
            if (::poll(&ready, 1, 1000) <= 0) continue;
            std::array<char, 4096> bytes;
            const ssize_t count = ::read(fd_, bytes.data(), bytes.size());
            if (count <= 0) break;
            drawn.append(bytes.data(), static_cast<std::size_t>(count));
        }
        return drawn;
    }
    int status(int options = 0) {
        int status = 0;
        EXPECT_EQ(::waitpid(pid_, &status, options), pid_);
        if (!WIFSTOPPED(status)) pid_ = 0;
        return status;
    }
    /// Whether lines are edited and keys echoed, as a shell left it.
    [[nodiscard]] bool is_as_before() const {
        termios now{};
        return ::tcgetattr(fd_, &now) == 0 && now.c_lflag == before_.c_lflag && now.c_iflag == before_.c_iflag;
    }

private:
    int fd_ = -1;
    pid_t pid_ = 0;
    termios before_{};
};

struct TopInATerminal : testing::Test {
    TemporaryFolder folder;
    std::string socket = folder.path() / "control.sock";
    std::optional<FakeDaemonProcess> daemon{socket};

    void SetUp() override {
        const auto until = std::chrono::steady_clock::now() + 20s;
        while (::access(socket.c_str(), F_OK) != 0) ASSERT_LT(std::chrono::steady_clock::now(), until);
    }
};

TEST_F(TopInATerminal, QuitsWithQAlsoWhereItsInputDoesNotControlTheProgram) {
    for (const bool controlling : {true, false}) {
        Top top{socket, controlling};
        EXPECT_THAT(top.seen("quit"), AllOf(HasSubstr(entered), HasSubstr("bulkhead top")));
        EXPECT_FALSE(top.is_as_before());
        top.type("q");
        EXPECT_THAT(top.seen(left), AllOf(HasSubstr("\x1b[?25h"), EndsWith(left))) << "the cursor is back";
        EXPECT_EQ(top.status(), 0);
        EXPECT_TRUE(top.is_as_before());
    }
}

TEST_F(TopInATerminal, EverySignalBringsTheTerminalBack) {
    for (const int number : {SIGTERM, SIGHUP, SIGINT, SIGQUIT}) {
        Top top{socket};
        top.seen("quit");
        number == SIGINT ? top.type("\x03") : top.signal(number);
        EXPECT_THAT(top.seen(left), EndsWith(left)) << number;
        const int status = top.status();
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == number) << status;
        EXPECT_TRUE(top.is_as_before()) << number;
    }
}

TEST_F(TopInATerminal, ComesBackAfterCtrlZ) {
    Top top{socket};
    top.seen("quit");
    top.type("\x1a");
    EXPECT_THAT(top.seen(left), HasSubstr(left));
    EXPECT_TRUE(WIFSTOPPED(top.status(WUNTRACED)));
    EXPECT_TRUE(top.is_as_before());
    top.signal(SIGCONT);
    EXPECT_THAT(top.seen("quit"), HasSubstr(entered));
    EXPECT_FALSE(top.is_as_before());
}

TEST_F(TopInATerminal, FollowsTheTerminalsSize) {
    Top top{socket};
    EXPECT_THAT(top.seen("quit"), HasSubstr("\x1b[24;1H"));
    top.resize(40, 12);
    EXPECT_THAT(top.seen("quit"), AllOf(HasSubstr("\x1b[12;1H"), testing::Not(HasSubstr("\x1b[13;1H"))));
}

TEST_F(TopInATerminal, WaitsForADaemonThatWentAway) {
    Top top{socket};
    top.seen("quit");
    daemon.reset();
    EXPECT_THAT(top.seen("trying again"), HasSubstr("no daemon"));
    daemon.emplace(socket);
    EXPECT_THAT(top.seen("bulkhead top"), HasSubstr("bulkhead top"));
    top.type("q");
    top.seen(left);
    EXPECT_EQ(top.status(), 0);
}

TEST(TopsKeys, AfterTheOneThatQuitsAreNotObeyed) {
    std::vector<std::string> orders;
    FakeDaemon daemon{[&](FakeDaemon& d) {
        d.next_connection();  // after the one that only looks for a daemon
        for (json::object asked = d.request(); !asked.empty(); asked = d.request()) {
            const std::string method{asked.at("method").as_string()};
            if (method.starts_with("model.")) orders.push_back(method);
            d.answer(asked, {{"models", {{{"model", "voice"}, {"replica", 0}, {"state", "ready"}}}}});
        }
    }};
    Top top{daemon.path()};
    EXPECT_THAT(top.seen("voice"), HasSubstr("voice"));
    top.type("quy");  // unload, yes
    top.seen(left);
    EXPECT_EQ(top.status(), 0);
    daemon.finish();
    EXPECT_THAT(orders, testing::IsEmpty());
}

}  // namespace
}  // namespace bulkhead::cli
