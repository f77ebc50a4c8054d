// Faults 22 and 24: limits and text that turn against the daemon.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/raw_socket.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

/// Of workers, as the daemon made them; none where it may make none.
std::set<std::string> folders_of(const std::string& containment) {
    std::set<std::string> names;
    constexpr std::string_view prefix = "cgroup ";
    if (!containment.starts_with(prefix)) return names;
    for (const auto& entry : std::filesystem::directory_iterator{containment.substr(prefix.size())})
        if (entry.is_directory()) names.insert(entry.path().filename());
    return names;
}

/// The number that the next descriptor of a process would get.
int lowest_free_descriptor(pid_t pid) {
    int number = 0;
    while (std::filesystem::exists(
        std::filesystem::symlink_status("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number))))
        ++number;
    return number;
}

TEST(Fault22, ASupervisorWithoutRoomForASpawnsDescriptorsEndsThatWorkerAlone) {
    SpawnOptions options;
    options.programs = minimal_programs();
    Daemon daemon{fleet({minimal_model("neighbour"), minimal_model("m")}), options};
    auto neighbour = daemon.open("neighbour").value();
    auto client = daemon.connect();
    const auto supervisor =
        static_cast<pid_t>(client.call("daemon.ping").value().result.at("supervisor_pid").as_int64());
    const std::string containment{daemon.call("daemon.info").value().at("containment").as_string()};
    auto folders = folders_of(containment);
    rlimit before{};
    ASSERT_EQ(::prlimit(supervisor, RLIMIT_NOFILE, nullptr, &before), 0);
    const rlimit none{static_cast<rlim_t>(lowest_free_descriptor(supervisor)), before.rlim_max};
    ASSERT_EQ(::prlimit(supervisor, RLIMIT_NOFILE, &none, nullptr), 0);

    const auto loaded = client.call("model.load", {{"model", "m"}});

    ASSERT_EQ(::prlimit(supervisor, RLIMIT_NOFILE, &before, nullptr), 0);
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::resources_exhausted) << loaded.error().text();
    EXPECT_THAT(loaded.error().attempt, HasSubstr("receiving its descriptors"));
    EXPECT_EQ(pids_with_environment("BULKHEAD_SOCKET=" + daemon.socket().string()).size(), 2U)
        << "the supervisor and the neighbour's worker";
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four));
    EXPECT_EQ(client.call("daemon.ping").value().result.at("supervisor_pid").as_int64(), supervisor);
    EXPECT_TRUE(daemon.load("m")) << "as soon as there is room";
    if (!folders.empty()) folders.insert(fmt::format("m.0.{}", daemon.row("m").at("generation").as_int64()));
    EXPECT_EQ(folders_of(containment), folders) << "of the one that failed nothing is left";
}

TEST(Fault22, AFullDiskUnderTheRuntimeDirectoryFailsNoSpawn) {
    TemporaryFolder folder;
    const auto disk = folder.path() / "disk";
    std::filesystem::create_directory(disk);
    if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "mode=0700,size=64k") != 0)
        GTEST_SKIP() << "this user may not mount a file system";
    const std::string socket = disk / "run/control.sock";
    const auto file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));
    const auto cli = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), {program("bulkhead"), "--socket", socket});
        return run(arguments, {{"XDG_CACHE_HOME", std::string{BULKHEAD_BINARY_DIR} + "/test-cache"}});
    };
    ASSERT_EQ(cli({"up", file}).exit_code, 0);
    {
        std::ofstream filler{disk / "filler"};
        while (filler << std::string(4096, 'x') << std::flush) {
        }
    }

    const Finished load = cli({"load", "echo"});
    const Finished unload = cli({"unload", "echo"});
    const Finished down = cli({"down"});

    EXPECT_EQ(load.exit_code, 0) << load.err;
    EXPECT_EQ(unload.exit_code, 0) << unload.err;
    EXPECT_EQ(down.exit_code, 0) << down.err;
    ::umount2(disk.c_str(), MNT_DETACH);
}

TEST(Fault24, NamesWithControlCharactersAreRefusedAndNeverShownRaw) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    const std::vector<std::string> evil{"a\nb", "\x1b[2J\x1b[31mred", std::string{"a\0b", 3}, "a\rb", "\u202Eabc"};
    for (const std::string& name : evil) {
        const auto unknown = daemon.load(name);
        ASSERT_FALSE(unknown);
        for (const char c : unknown.error().text())
            EXPECT_GE(static_cast<unsigned char>(c), 0x20) << "raw, in an error";
        EXPECT_FALSE(daemon.call("channel.open", {{"model", "echo"}, {"client", name}}));
        const auto socket = unix_client(daemon.socket());
        send_text(socket, json::serialize(json::object{{"jsonrpc", "2.0"}, {"id", name}, {"method", name}}) + "\n");
        const std::string answer = read_line(socket);
        EXPECT_THAT(answer, HasSubstr("no such method"));
        for (const char c : answer) EXPECT_GE(static_cast<unsigned char>(c), 0x20);
    }
    for (const char c : daemon.output()) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20);
}

TEST(Fault24, AGibibyteOfStandardErrorIsEscapedBoundedAndHarmsNobody) {
    Daemon daemon{
        fleet({evil_model("loud", "ok", "print1gib", "deadlines: {request: 2m}"), test_model("quiet", "echo.pt")})};
    auto quiet = daemon.open("quiet").value();
    auto loud = daemon.open("loud").value();
    auto room = loud.allocate(wire::DType::float32, dims_four).value();
    std::ranges::copy(four, room.as<float>().begin());
    const std::array inputs{NamedInput{"x", &room}};
    Request request;
    request.inputs = inputs;

    const auto number = loud.submit(request).value();
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(infer_float(quiet, "x", four, dims_four)) << "while it prints";
    EXPECT_TRUE(daemon.call("daemon.info"));
    const auto reply = loud.wait(number);

    EXPECT_TRUE(reply) << reply.error().text();
    ASSERT_TRUE(daemon.unload("loud"));  // what was dropped is told with the next
                                         // line, or at the end
    const auto lines = daemon.call("logs.tail", {{"model", "loud"}, {"lines", 2'000}}).value();
    const std::string text = json::serialize(lines);
    EXPECT_LT(text.size(), 1u << 20);
    EXPECT_NE(text.find("lines dropped"), std::string::npos);
    EXPECT_NE(text.find("x1b[31m"), std::string::npos);
    std::uintmax_t kept = 0;
    for (const auto& entry : std::filesystem::directory_iterator{daemon.runtime_directory() / "logs"}) {
        kept += entry.file_size();
        std::ifstream file{entry.path(), std::ios::binary};
        for (char c = 0; file.get(c);)
            ASSERT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20) << "raw, in " << entry.path();
    }
    EXPECT_LT(kept, 8u << 20);
}

}  // namespace
}  // namespace bulkhead::test
