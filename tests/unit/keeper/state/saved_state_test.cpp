#include "supervisor/keeper/state/saved_state.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "tests/unit/keeper/keeper_process.h"

namespace bulkhead::keeper {
namespace {

using test::key_of;
using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;

Bytes read_all(int memfd) {
    const auto size = static_cast<std::size_t>(::lseek(memfd, 0, SEEK_END));
    Bytes bytes(size);
    EXPECT_EQ(::pread(memfd, bytes.data(), size, 0), static_cast<ssize_t>(size));
    return bytes;
}

/// One running worker, one that is ending, one dead and reported, one dead and not; descriptors that
/// nobody opened.
struct State : ::testing::Test {
    std::unique_ptr<WorkerTable> table = std::make_unique<WorkerTable>();
    SavedKeeper saved{};
    Bytes bytes;

    Worker& add(std::uint64_t generation, Worker::State state, int first_fd) {
        Worker& worker = *table->free_slot();
        worker.state = state;
        worker.key = key_of("m" + std::to_string(generation), generation);
        worker.pid = 1000 + static_cast<pid_t>(generation);
        worker.spawned_unix_ms = 99;
        worker.fate = state == Worker::State::running ? WorkerFate::running : WorkerFate::killed_by_signal;
        if (first_fd >= 0) {
            worker.pidfd = UniqueFd{first_fd};
            worker.link = UniqueFd{first_fd + 1};
            worker.log = UniqueFd{first_fd + 2};
        }
        return worker;
    }

    void SetUp() override {
        saved.pid = 77;
        saved.directory_fd = 900;
        saved.listening_fd = 901;
        saved.generation_last = 10;
        saved.supervisor_starts = 3;
        const std::string blob{"blob\0with zero", 14};
        table->set_ledger(add(1, Worker::State::running, 910), std::as_bytes(std::span{blob}));
        add(2, Worker::State::ending, 920).group_deadline = Clock::time_point{std::chrono::seconds{5}};
        Worker& told = add(3, Worker::State::dead, -1);
        told.exit_number = 9;
        told.group_empty = true;
        add(10, Worker::State::dead, 930).exit_due = true;
        bytes = read_all(write_state(saved, "/run/x/control.sock", *table).get());
    }

    void TearDown() override {  // numbers that belong to nobody
        for (Worker& worker : table->all())
            for (UniqueFd* fd : {&worker.pidfd, &worker.link, &worker.log}) (void)fd->release();
    }

    /// Where worker `index` lies; the first one's ledger has 14 bytes.
    [[nodiscard]] std::size_t worker_at(std::size_t index) const {
        return sizeof(StateHeader) + sizeof(SavedKeeper) + std::strlen("/run/x/control.sock") +
               index * sizeof(SavedWorker) + (index > 0 ? 14 : 0);
    }
    template <typename T>
    void put(std::size_t at, T value) {
        std::memcpy(bytes.data() + at, &value, sizeof value);
    }
    template <typename Field>
    void put_worker(std::size_t index, Field SavedWorker::*field, Field value) {
        SavedWorker worker;
        std::memcpy(&worker, bytes.data() + worker_at(index), sizeof worker);
        worker.*field = value;
        put(worker_at(index), worker);
    }
    template <typename Field>
    void put_keeper(Field SavedKeeper::*field, Field value) {
        SavedKeeper keeper;
        std::memcpy(&keeper, bytes.data() + sizeof(StateHeader), sizeof keeper);
        keeper.*field = value;
        put(sizeof(StateHeader), keeper);
    }
    void expect_refused(const char* why) {
        const auto read = parse_state(bytes);
        ASSERT_FALSE(read) << why;
        EXPECT_EQ(read.error().code, ErrorCode::protocol_violation);
        EXPECT_THAT(read.error().attempt, HasSubstr(why));
        EXPECT_NE(read.error().remedy, "");
    }
};

TEST_F(State, IsReadAsItWasWritten) {
    const auto read = parse_state(bytes);

    ASSERT_TRUE(read) << read.error().text();
    EXPECT_EQ(read->socket_path, "/run/x/control.sock");
    EXPECT_EQ(read->keeper.pid, 77);
    EXPECT_EQ(read->keeper.generation_last, 10U);
    EXPECT_EQ(read->keeper.supervisor_starts, 3U);
    ASSERT_EQ(read->workers.size(), 4U);
    EXPECT_EQ(read->workers[0].fixed.key, key_of("m1", 1));
    EXPECT_EQ(read->workers[0].fixed.link, 911);
    EXPECT_EQ(
        std::string(reinterpret_cast<const char*>(read->workers[0].ledger.data()), read->workers[0].ledger.size()),
        (std::string{"blob\0with zero", 14}));
    EXPECT_EQ(read->workers[1].fixed.group_deadline_ns, 5'000'000'000);
    EXPECT_EQ(read->workers[2].fixed.exit_number, 9);
    EXPECT_EQ(read->workers[2].fixed.group_empty, 1U);
    EXPECT_EQ(read->workers[2].fixed.link, -1);
    EXPECT_EQ(read->workers[3].fixed.exit_due, 1U);
    EXPECT_EQ(read->workers[3].fixed.log, 932);
}

TEST_F(State, CutOffAnywhereIsRefused) {
    for (std::size_t size = 0; size < bytes.size(); ++size) {
        EXPECT_FALSE(parse_state(std::span{bytes}.first(size))) << size;
        if (size < sizeof(StateHeader)) continue;
        // And says so itself.
        Bytes cut{bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)};
        const std::uint64_t told = size;
        std::memcpy(cut.data() + offsetof(StateHeader, size_bytes), &told, sizeof told);
        EXPECT_FALSE(parse_state(cut)) << size;
    }
}

/// Most changes are refused, and none reads beyond the bytes: the sanitizers watch this.
TEST_F(State, WithAnyByteChangedIsRefusedOrStillMakesSense) {
    for (std::size_t at = 0; at < bytes.size(); ++at) {
        for (const std::byte flip : {std::byte{0x01}, std::byte{0x80}, std::byte{0xFF}}) {
            bytes[at] ^= flip;
            if (const auto read = parse_state(bytes)) {
                EXPECT_EQ(read->workers.size(), 4U) << at;
                for (const auto& worker : read->workers) EXPECT_LE(worker.fixed.key.generation, 0xFFFF'FFFF'FFFF'FFFF);
            }
            bytes[at] ^= flip;
        }
    }
}

TEST_F(State, ThatContradictsItselfIsRefused) {
    const Bytes sound = bytes;
    const auto refused_after = [&](auto change, const char* why) {
        bytes = sound;
        change();
        expect_refused(why);
    };
    refused_after([&] { put(0, 'X'); }, "does not begin as a state");
    refused_after([&] { put(offsetof(StateHeader, version), std::uint32_t{0}); }, "version 0");
    refused_after([&] { put(offsetof(StateHeader, version), state_version + 1); },
                  "it has version 3, and this release reads 2");
    refused_after([&] { put(offsetof(StateHeader, size_bytes), ~std::uint64_t{0}); }, "its header does not fit it");
    refused_after([&] { put(offsetof(StateHeader, worker_count), std::uint32_t{257}); }, "its header does not fit it");
    refused_after([&] { put(offsetof(StateHeader, worker_count), std::uint32_t{5}); }, "ends within a worker");
    refused_after([&] { put(offsetof(StateHeader, worker_count), std::uint32_t{3}); }, "something follows");
    refused_after([&] { put(offsetof(StateHeader, worker_bytes), std::uint32_t{8}); }, "its header does not fit it");
    refused_after([&] { put_keeper(&SavedKeeper::socket_path_bytes, ~0U); }, "within the keeper's part");
    refused_after([&] { put_worker(0, &SavedWorker::ledger_bytes, 1025U); }, "within a worker");
    refused_after([&] { put_worker(3, &SavedWorker::ledger_bytes, 1U); }, "within a worker");
    bytes = sound;
    bytes.push_back({});
    expect_refused("its header does not fit it");
}

TEST_F(State, ThatMayStillChangeIsNotRead) {
    const UniqueFd unsealed{::memfd_create("state", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    ASSERT_EQ(::write(unsealed.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));

    EXPECT_THAT(map_state(unsealed.get()).error().attempt, HasSubstr("not a sealed memfd"));
    const UniqueFd empty{::memfd_create("state", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    ::fcntl(empty.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
    EXPECT_THAT(map_state(empty.get()).error().attempt, HasSubstr("too short"));
    EXPECT_THAT(map_state(STDERR_FILENO).error().attempt, HasSubstr("not a sealed memfd"));
    EXPECT_THAT(map_state(-1).error().attempt, HasSubstr("not a sealed memfd"));
}

}  // namespace
}  // namespace bulkhead::keeper
