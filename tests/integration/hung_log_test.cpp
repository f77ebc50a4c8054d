/// Where the daemon logs to, a terminal or a disk, stops taking anything: only the lines wait.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "ipc/base/unique_fd.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

/// Somebody can press Ctrl-S on it.
class Terminal {
public:
    Terminal() : master_{::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)} {
        std::array<char, 64> name{};
        EXPECT_EQ(::grantpt(master_.get()), 0);
        EXPECT_EQ(::unlockpt(master_.get()), 0);
        EXPECT_EQ(::ptsname_r(master_.get(), name.data(), name.size()), 0);
        slave_ = UniqueFd{::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC)};
        EXPECT_TRUE(slave_);
    }
    void stop() const { EXPECT_EQ(::tcflow(slave_.get(), TCOOFF), 0); }
    void go_on() const { EXPECT_EQ(::tcflow(slave_.get(), TCOON), 0); }
    /// Becomes standard error of a child.
    void take_over() const { ::dup2(slave_.get(), STDERR_FILENO); }
    bool shows(std::string_view text) {
        while (shown_.find(text) == std::string::npos) {
            pollfd source{master_.get(), POLLIN, 0};
            if (::poll(&source, 1, 20'000) != 1) return false;
            std::array<char, 4096> bytes{};
            const ssize_t count = ::read(master_.get(), bytes.data(), bytes.size());
            if (count <= 0) return false;
            shown_.append(bytes.data(), static_cast<std::size_t>(count));
        }
        return true;
    }

private:
    UniqueFd master_, slave_;
    std::string shown_;
};

SpawnOptions logging_to(const Terminal& terminal) {
    SpawnOptions options;
    options.programs = minimal_programs();
    options.in_child = [&terminal] { terminal.take_over(); };
    return options;
}

TEST(HungLog, ATerminalThatWasStoppedStopsNobodyElse) {
    Terminal terminal;
    Daemon daemon{fleet({minimal_model("m")}), logging_to(terminal)};
    ASSERT_TRUE(terminal.shows("containment=")) << "it logs there";

    terminal.stop();
    for (int i = 0; i < 3; ++i) {
        ASSERT_TRUE(daemon.load("m")) << daemon.why("m");
        EXPECT_EQ(daemon.row("m").at("state").as_string(), "ready");
        ASSERT_TRUE(daemon.unload("m"));
    }
    EXPECT_THAT(file_text(daemon.runtime_directory() / "logs/bulkheadd.log"), HasSubstr("loading->ready"))
        << "the disk takes what the terminal does not";

    terminal.go_on();
    EXPECT_TRUE(terminal.shows("m/0#3")) << "nothing was lost";
    terminal.stop();
    daemon.keeper().signal(SIGTERM);
    EXPECT_EQ(daemon.keeper().wait(20s), 0) << "its last words are not waited for";
}

TEST(HungLog, ATerminalThatWasStoppedHoldsUpNoSupervisorThatHasErrorsToTell) {
    Terminal terminal;
    Daemon daemon{fleet({minimal_model("m")}), logging_to(terminal)};
    ASSERT_TRUE(terminal.shows("containment=")) << "it logs there";
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info").value().at("supervisor_pid").as_int64());
    daemon.folder().write("fleet.yaml", "version: 1\nmodels: {m: [}\n");

    terminal.stop();
    ::kill(supervisor, SIGKILL);
    ASSERT_TRUE(wait_gone(supervisor));
    auto client = daemon.connect();
    const auto info = client.call("daemon.info", {}, 20s);

    ASSERT_TRUE(info) << info.error().text();
    EXPECT_THAT(std::string{info->result.at("fleet_error").as_string()}, HasSubstr("fleet.yaml"));
    terminal.go_on();
    EXPECT_TRUE(terminal.shows("error: ")) << "it is told when it can be";
}

/// A file system of its own that can be frozen: whoever writes to it then waits, in the kernel.
class Disk {
public:
    explicit Disk(const TemporaryFolder& folder) : path_{folder.path() / "disk"} {
        std::filesystem::create_directory(path_);
        const auto image = folder.write("image", "");
        std::filesystem::resize_file(image, 16 << 20);
        if (run({"mkfs.ext4", "-q", image}).exit_code != 0 || run({"mount", "-o", "loop", image, path_}).exit_code != 0)
            return;
        folder_ = UniqueFd{::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
        can_freeze_ = freeze() && thaw();
    }
    ~Disk() {
        if (!folder_) return;
        (void)thaw();
        folder_.reset();
        ::umount2(path_.c_str(), MNT_DETACH);
    }
    Disk(const Disk&) = delete;
    Disk& operator=(const Disk&) = delete;

    [[nodiscard]] bool can_freeze() const noexcept { return can_freeze_; }
    [[nodiscard]] bool freeze() const { return ::ioctl(folder_.get(), FIFREEZE, 0) == 0; }
    [[nodiscard]] bool thaw() const { return ::ioctl(folder_.get(), FITHAW, 0) == 0; }
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    std::filesystem::path path_;
    UniqueFd folder_;
    bool can_freeze_ = false;
};

TEST(HungLog, ADiskThatHangsStopsNobodyElse) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root may mount and freeze a disk";
    const TemporaryFolder folder;
    const Disk disk{folder};
    if (!disk.can_freeze()) GTEST_SKIP() << "no disk can be made here that can be frozen";
    const std::string socket = disk.path() / "run/control.sock";
    const auto fleet_file = folder.write("fleet.yaml", fleet({minimal_model("m"), minimal_model("n")}));
    const auto cli = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {program("bulkhead"), "--socket", socket});
        return run(arguments);
    };
    SpawnOptions options;
    options.output = folder.path() / "daemon.out";
    options.environment["XDG_CACHE_HOME"] = std::string{BULKHEAD_BINARY_DIR} + "/test-cache";
    Process keeper{{minimal_programs() / "bulkheadd", "--socket", socket, fleet_file}, options};
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (cli({"ps"}).exit_code != 0 && std::chrono::steady_clock::now() < until && !keeper.wait(10ms)) {
    }
    ASSERT_EQ(cli({"load", "m"}).exit_code, 0) << file_text(folder.path() / "daemon.out");

    ASSERT_TRUE(disk.freeze());
    const Finished load = cli({"load", "n"});
    const Finished unload = cli({"unload", "m"});
    const Finished rows = cli({"ps"});
    const Finished lines = cli({"logs", "n"});
    ASSERT_TRUE(disk.thaw());

    EXPECT_EQ(load.exit_code, 0) << load.err;
    EXPECT_EQ(unload.exit_code, 0) << unload.err;
    EXPECT_EQ(rows.exit_code, 0) << rows.err;
    EXPECT_THAT(rows.out, HasSubstr("ready"));
    EXPECT_EQ(lines.exit_code, 0) << lines.err;
    EXPECT_EQ(cli({"down"}).exit_code, 0);
    EXPECT_EQ(keeper.wait(20s), 0);
    EXPECT_THAT(file_text(disk.path() / "run/logs/bulkheadd.log"),
                testing::AllOf(HasSubstr("n/0#2"), HasSubstr("stopped")))
        << "what waited was written";
}

}  // namespace
}  // namespace bulkhead::test
