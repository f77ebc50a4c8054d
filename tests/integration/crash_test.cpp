// A worker dies: in which order that is noticed, and what is kept of it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>

#include <fstream>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

UniqueFd open_pidfd(pid_t pid) { return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))}; }

bool is_readable(int fd, int timeout_ms = 0) {
    pollfd entry{fd, POLLIN, 0};
    return ::poll(&entry, 1, timeout_ms) == 1;
}

std::string text(const json::object& object, std::string_view member) {
    return object.contains(member) && object.at(member).is_string() ? std::string{object.at(member).as_string()} : "";
}

/// A line of /proc/PID/limits.
std::string limit_of(pid_t pid, std::string_view name) {
    std::ifstream file{"/proc/" + std::to_string(pid) + "/limits"};
    for (std::string line; std::getline(file, line);)
        if (line.starts_with(name)) return line;
    return {};
}

TEST(Crash, IsReportedWithItsCulprit) {
    Daemon daemon{fleet({evil_model("evil", "ok", "segv", "restart: never")})};
    auto channel = daemon.open("evil").value();

    const auto reply = infer_float(channel, "x", four, dims_four);

    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::worker_lost);
    const json::object report = daemon.crash_of("evil");
    EXPECT_EQ(text(report, "signal"), "SIGSEGV");
    EXPECT_THAT(text(report, "cause"), AllOf(HasSubstr("SIGSEGV"), HasSubstr("evil_segv"),
                                             HasSubstr("while running forward(x float32[4])")))
        << json::serialize(report);
    EXPECT_THAT(json::serialize(report.at("log")), HasSubstr("ready after"));
    EXPECT_FALSE(report.at("backtrace").as_array().empty());
}

/// A core file, if one is written, lies in the daemon's folder: at most 4 KiB of it.
TEST(Crash, WithCoreFilesAllowedADeathIsNoticedAsSoon) {
    Daemon daemon{fleet({minimal_model("dumps", "MINIMAL_BALLAST_BYTES: \"268435456\"", "core_dump: 4096"),
                         minimal_model("dumps-not")}),
                  minimal()};
    auto channel = daemon.open("dumps").value();
    ASSERT_TRUE(infer_float(channel, "x", four, dims_four));
    const pid_t worker = daemon.pid("dumps");
    const UniqueFd pidfd = open_pidfd(worker);
    ASSERT_TRUE(daemon.load("dumps-not"));
    EXPECT_THAT(limit_of(daemon.pid("dumps-not"), "Max core file size"), HasSubstr(" 0 "));
    EXPECT_THAT(limit_of(worker, "Max core file size"), AnyOf(HasSubstr(" 4096 "), HasSubstr(" 0 ")));

    ::kill(worker, SIGSEGV);
    EXPECT_TRUE(is_readable(channel.fd(), 30'000));
    EXPECT_FALSE(is_readable(pidfd.get())) << "it could be reaped by then";
    EXPECT_EQ(text(daemon.crash_of("dumps"), "signal"), "SIGSEGV");
}

}  // namespace
}  // namespace bulkhead::test
