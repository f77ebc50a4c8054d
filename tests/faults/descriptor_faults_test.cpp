// Faults 6, 7, 8, 12 and 20: descriptors that come, and those that a child gets.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

#include "tests/faults/raw_channel.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/unit/clients/fake_worker.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;

/// Number and target of every descriptor of a process.
std::map<int, std::string> descriptors_of(pid_t pid) {
    std::map<int, std::string> all;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/fd"})
        all[std::stoi(entry.path().filename())] = std::filesystem::read_symlink(entry.path(), ignored).string();
    return all;
}

TEST(Fault06, SurplusDescriptorsAreAllClosedAndTheWorkerServesOn) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel other{daemon, "echo"};
    other.greet();
    RawChannel client{daemon, "echo"};
    client.greet();
    const pid_t worker = daemon.pid("echo");
    const std::size_t fds_before = open_fds(worker);
    const UniqueFd null{::open("/dev/null", O_RDWR | O_CLOEXEC)};
    const std::vector<int> many(253, null.get());

    for (int i = 0; i < 20; ++i) client.send(channel::encode(channel::Cancel{99}), many);
    other.expect_served(1);

    EXPECT_EQ(daemon.pid("echo"), worker);
    EXPECT_LE(open_fds(worker), fds_before);
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

    for (int i = 0; i < 20; ++i) client.send(channel::encode(channel::Cancel{99}), many);  // MSG_CTRUNC at the worker
    other.expect_served(1);

    EXPECT_EQ(daemon.pid("echo"), worker);
    RawChannel third{daemon, "echo"};
    third.greet();
    third.expect_served(1);
}

/// What a client makes of a slab that a lying worker offers.
Error adopt_from(const std::function<UniqueFd()>& make, std::uint64_t claimed_bytes = 4096) {
    FakeWorker worker{[&](FakeWorker& self) {
        self.expect<channel::Hello>();
        self.send(channel::encode(self.welcome).value());
        const UniqueFd fd = make();
        const std::array<int, 1> fds{fd.get()};
        self.send(channel::encode(
                      channel::SlabOffer{0, 0, wire::SlabDirection::input, wire::SlabKind::host_memfd, claimed_bytes}),
                  fds);
        self.await_hang_up();
    }};
    const auto channel = Channel::adopt(worker.client_end());
    return channel ? Error{} : channel.error();
}

TEST(Fault07, APipeOrDevZeroAsMemoryIsRejected) {
    const auto pipe_end = [] {
        std::array<int, 2> ends{};
        EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
        ::close(ends[1]);
        return UniqueFd{ends[0]};
    };
    EXPECT_EQ(adopt_from(pipe_end).code, ErrorCode::protocol_violation);
    EXPECT_EQ(adopt_from([] { return UniqueFd{::open("/dev/zero", O_RDWR | O_CLOEXEC)}; }).code,
              ErrorCode::protocol_violation);
    EXPECT_EQ(adopt_from([] { return UniqueFd{::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)}; }).code,
              ErrorCode::protocol_violation);

    // The other way round nothing is taken at all: slabs are the worker's to make, and tensors lie in slabs.
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    client.greet();
    const std::size_t fds_before = open_fds(daemon.pid("echo"));
    const UniqueFd pipe = pipe_end();
    const std::array<int, 1> fds{pipe.get()};
    channel::Tensor elsewhere = client.tensor(4);
    elsewhere.lease.slab_id = 77;
    channel::Infer request;
    request.request_id = 1;
    request.method = "forward";
    request.tensors = {elsewhere};
    client.send(channel::encode(request).value(), fds);
    EXPECT_EQ(client.expect_error().code, ErrorCode::protocol_violation);
    EXPECT_LE(open_fds(daemon.pid("echo")), fds_before);
}

TEST(Fault08, AnUnsealedMemfdIsRejectedSoThatNobodyDiesOfSigbus) {
    const auto memfd = [](int seals) {
        return [seals] {
            UniqueFd fd{::memfd_create("fault", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
            EXPECT_EQ(::ftruncate(fd.get(), 4096), 0);
            EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
            return fd;
        };
    };
    EXPECT_THAT(adopt_from(memfd(0)).attempt, HasSubstr("not sealed"));
    EXPECT_THAT(adopt_from(memfd(F_SEAL_GROW | F_SEAL_SEAL)).attempt, HasSubstr("not sealed"));
    EXPECT_EQ(adopt_from(memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 1 << 20).code, ErrorCode::protocol_violation)
        << "sealed, and smaller than it claims";

    // What a real worker offers cannot be shrunk under it by its client.
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    client.greet();
    EXPECT_EQ(::ftruncate(client.slab(wire::SlabDirection::input).memory.fd(), 0), -1);
    EXPECT_EQ(errno, EPERM);
    client.expect_served(1);
}

// What needs GPU slabs, an importer that holds a handle of a dead worker, is provable only with them.
TEST(Fault12, AWrongGpuUuidAndAGpuSlabWhereThereAreNoneAreErrorsThatHurtNobody) {
    TemporaryFolder folder;
    const auto gpus = folder.write("gpus", "");
    SpawnOptions options;
    options.environment["BULKHEAD_NVML"] = std::string{BULKHEAD_BINARY_DIR} + "/lib/libbulkhead_fake_nvml.so";
    options.environment["BULKHEAD_FAKE_NVML"] = gpus;
    Daemon daemon{fleet({test_model("lost", "echo.pt", "device: GPU-00000000-1111-2222-3333-444444444444"),
                         test_model("echo", "echo.pt")}),
                  options};
    RawChannel client{daemon, "echo"};
    client.greet();

    const auto loaded = daemon.load("lost");
    client.send(channel::encode(channel::SlabRequest{5, wire::SlabDirection::input, wire::SlabKind::cuda_vmm, 4096}));

    ASSERT_FALSE(loaded);
    EXPECT_THAT(loaded.error().text(), HasSubstr("GPU-00000000-1111-2222-3333-444444444444"));
    EXPECT_FALSE(loaded.error().remedy.empty());
    EXPECT_EQ(client.expect_error().code, ErrorCode::input_invalid);
    client.expect_served(1);
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
