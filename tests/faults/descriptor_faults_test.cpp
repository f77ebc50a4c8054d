// Faults 6 and 20: descriptors that come, and those that a child gets.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <set>

#include "tests/faults/raw_channel.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

using ::testing::HasSubstr;

/// Number and target of every descriptor of a process.
std::map<int, std::string> descriptors_of(pid_t pid) {
    std::map<int, std::string> all;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/fd"})
        all[std::stoi(entry.path().filename())] = std::filesystem::read_symlink(entry.path(), ignored).string();
    return all;
}

TEST(Fault06, AMessageCutShortForWantOfDescriptorsLosesThatChannelAlone) {
    SpawnOptions options;
    options.open_files_max = 64;
    Daemon daemon{fleet({test_model("echo", "echo.pt")}), options};
    RawChannel other{daemon, "echo"};
    other.greet();
    RawChannel client{daemon, "echo"};
    client.greet();
    const pid_t worker = daemon.pid("echo");
    const UniqueFd null{::open("/dev/null", O_RDWR | O_CLOEXEC)};
    const std::vector<int> many(253, null.get());

    // MSG_CTRUNC at the worker.
    for (int i = 0; i < 20; ++i) client.send(channel::encode(channel::Cancel{99}), many);
    other.expect_served(1);

    EXPECT_EQ(daemon.pid("echo"), worker);
    RawChannel third{daemon, "echo"};
    third.greet();
    third.expect_served(1);
}

TEST(Fault20, AChildHasExactlyTheDescriptorsItWasMeantToHave) {
    // Left open across exec on purpose, low and high, in the process that starts the daemon.
    const UniqueFd full{::open("/dev/full", O_RDWR)};
    const int low = ::dup(full.get());
    const int high = ::fcntl(full.get(), F_DUPFD, 200);
    Daemon daemon{fleet({test_model("a", "echo.pt"), test_model("b", "echo.pt")})};
    ::close(low);
    ::close(high);
    ASSERT_TRUE(daemon.load("a"));
    ASSERT_TRUE(daemon.load("b"));
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());

    const auto a = descriptors_of(daemon.pid("a"));
    const auto b = descriptors_of(daemon.pid("b"));
    EXPECT_EQ(a.at(0), "/dev/null");
    EXPECT_EQ(a.at(1), a.at(2));
    EXPECT_THAT(a.at(1), HasSubstr("pipe:"));
    EXPECT_THAT(a.at(3), HasSubstr("socket:"));
    std::set<std::string> of_a;
    for (const auto& [number, target] : a)
        if (target.starts_with("socket:") || target.starts_with("pipe:")) of_a.insert(target);
    for (const auto& [number, target] : b) EXPECT_FALSE(of_a.contains(target)) << "shared with a neighbour: " << target;
    for (const pid_t pid : {daemon.pid("a"), daemon.pid("b"), supervisor, daemon.keeper().pid()})
        for (const auto& [number, target] : descriptors_of(pid))
            EXPECT_NE(target, "/dev/full") << "pid " << pid << " has descriptor " << number;
    // The supervisor's end of the links, the listening socket: in no worker.
    for (const auto& [number, target] : descriptors_of(supervisor))
        EXPECT_FALSE(target.starts_with("socket:") && of_a.contains(target)) << number << " of the supervisor";
}

}  // namespace
}  // namespace bulkhead::test
