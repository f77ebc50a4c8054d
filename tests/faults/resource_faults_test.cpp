// Faults 21 to 24: files, limits and text that turn against the daemon.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/raw_socket.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Fault21, ASymlinkedForeignOrOpenRuntimeDirectoryIsRefused) {
    TemporaryFolder folder;
    const auto fleet_file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));
    const auto start_in = [&](const std::string& name) {
        return run({program("bulkheadd"), "--socket", folder.path() / name / "control.sock", fleet_file});
    };
    std::filesystem::create_directory(folder.path() / "elsewhere");
    ::chmod((folder.path() / "elsewhere").c_str(), 0700);
    std::filesystem::create_directory_symlink(folder.path() / "elsewhere", folder.path() / "link");
    std::filesystem::create_directory(folder.path() / "open");
    ::chmod((folder.path() / "open").c_str(), 0777);
    folder.write("file", "not a folder");

    for (const char* name : {"link", "open", "file"}) {
        const Finished finished = start_in(name);
        EXPECT_EQ(finished.exit_code, 1) << name;
        EXPECT_THAT(finished.err, HasSubstr("not_permitted")) << name;
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path() / "elsewhere")) << "nothing was made where the link leads";
    if (::getuid() == 0) {
        std::filesystem::create_directory(folder.path() / "foreign");
        ASSERT_EQ(::chown((folder.path() / "foreign").c_str(), 65534, 65534), 0);
        ::chmod((folder.path() / "foreign").c_str(), 0700);
        EXPECT_THAT(start_in("foreign").err, HasSubstr("not_permitted"));
    }
    // A file of that name, put there before: no socket, so it is not replaced.
    std::filesystem::create_directory(folder.path() / "taken");
    ::chmod((folder.path() / "taken").c_str(), 0700);
    std::ofstream{folder.path() / "taken/control.sock"} << "somebody's";
    EXPECT_NE(start_in("taken").exit_code, 0);
    EXPECT_TRUE(std::filesystem::is_regular_file(folder.path() / "taken/control.sock"));
}

/// Of workers, as the daemon made them; none where it may make none.
std::set<std::string> folders_of(const std::string& containment) {
    std::set<std::string> names;
    constexpr std::string_view prefix = "cgroup ";
    if (!containment.starts_with(prefix)) return names;
    for (const auto& entry : std::filesystem::directory_iterator{containment.substr(prefix.size())})
        if (entry.is_directory()) names.insert(entry.path().filename());
    return names;
}

TEST(Fault22, ASpawnThatRunsOutOfDescriptorsIsRolledBackAndNeighboursServeOn) {
    constexpr int models_count = 24;
    std::string yaml = fleet({});
    for (int i = 0; i < models_count; ++i) yaml += test_model("m" + std::to_string(i), "echo.pt");
    SpawnOptions options;
    options.open_files_max = 36;  // of the keeper: three for each worker; and of the supervisor
    Daemon daemon{yaml, options};
    auto first = daemon.open("m0").value();
    // Opened while there is room: at its limit the daemon refuses new connections, and says so.
    ControlClient control = daemon.connect();
    const auto call = [&](std::string_view method, const std::string& model) {
        return control.call(method, {{"model", model}}, std::chrono::seconds{100});
    };
    const auto row = [&](const std::string& model) {
        const json::value status = control.call("fleet.status").value().result;
        const auto& rows = status.at("models").as_array();
        const auto found =
            std::ranges::find_if(rows, [&](const auto& each) { return each.at("model").as_string() == model; });
        return json::object{found->as_object()};
    };
    const std::string containment{control.call("daemon.info").value().result.at("containment").as_string()};

    std::optional<Error> refused;
    int loaded = 1;
    for (; loaded < models_count && !refused; ++loaded)
        if (const auto result = call("model.load", "m" + std::to_string(loaded)); !result) refused = result.error();

    ASSERT_TRUE(refused) << "it was not short of descriptors";
    EXPECT_EQ(refused->code, ErrorCode::resources_exhausted) << refused->text();
    EXPECT_FALSE(refused->remedy.empty());
    const std::string failed = "m" + std::to_string(loaded - 1);
    EXPECT_TRUE(row(failed).at("pid").is_null()) << "nothing of it is left";
    EXPECT_TRUE(infer_float(first, "x", four, dims_four));
    const std::size_t keeper_fds = open_fds(daemon.keeper().pid());
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(call("model.load", failed));
    // The last one may have had a process, which the supervisor could not take over and which is still ending.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{10};
    while (open_fds(daemon.keeper().pid()) > keeper_fds && std::chrono::steady_clock::now() < until) {
    }
    EXPECT_LE(open_fds(daemon.keeper().pid()), keeper_fds);
    for (const char* model : {"m1", "m2"}) {
        const auto unloaded = call("model.unload", model);
        ASSERT_TRUE(unloaded) << unloaded.error().text();
    }
    const auto again = call("model.load", failed);
    EXPECT_TRUE(again) << "as soon as there is room: " << again.error().text();
    std::set<std::string> running;
    for (int i = 0; i < loaded; ++i) {
        const json::object found = row("m" + std::to_string(i));
        if (found.at("state").as_string() != "ready") continue;
        running.insert(fmt::format("m{}.0.{}", i, found.at("generation").as_int64()));
    }
    const bool has_cgroups = containment.starts_with("cgroup ");
    EXPECT_EQ(folders_of(containment), has_cgroups ? running : std::set<std::string>{});
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

TEST(Fault23, AHostileFleetFileIsRejectedWholeAndTheOldFleetStays) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo").value();
    const pid_t worker = daemon.pid("echo");
    std::string bomb = "version: 1\nmodels:\n  x: &x0 {a: 1, b: 1, c: 1, d: 1}\n";
    for (int i = 1; i < 12; ++i)
        bomb += "  x" + std::to_string(i) + ": &x" + std::to_string(i) + " {a: *x" + std::to_string(i - 1) + ", b: *x" +
                std::to_string(i - 1) + ", c: *x" + std::to_string(i - 1) + "}\n";
    const std::vector<std::pair<std::string, std::string>> hostile{
        {bomb, "more than 10000 values"},
        {"version: 1\nmodels: " + std::string(100'000, '['), ""},
        {"version: 1\nmodels: {a: " + std::string(40, '[') + std::string(40, ']') + "}\n", "nested more than 32"},
        {fleet({test_model("echo", "echo.pt"), test_model("echo", "echo.pt")}), "duplicate key"},
        {fleet({test_model("echo", "echo.pt"), test_model("new", "not_there.pt")}), "no file"},
        {"version: 1\nmodels: {a: &a {b: *a}}\n", "cycle"},
    };
    for (const auto& [yaml, words] : hostile) {
        daemon.folder().write("fleet.yaml", yaml);

        const auto reloaded = daemon.call("fleet.reload");

        EXPECT_FALSE(reloaded) << yaml.substr(0, 40);
        const Finished validated = daemon.cli({"validate", daemon.folder().path() / "fleet.yaml"});
        EXPECT_EQ(validated.exit_code, 78);
        EXPECT_THAT(validated.out + validated.err, HasSubstr(words));
        EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
        EXPECT_EQ(daemon.pid("echo"), worker);
        EXPECT_TRUE(daemon.row("new").empty()) << "not even the part that was right";
    }
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
        const auto socket = raw_connection(daemon.socket());
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
    ASSERT_TRUE(daemon.unload("loud"));  // what was dropped is told with the next line, or at the end
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
