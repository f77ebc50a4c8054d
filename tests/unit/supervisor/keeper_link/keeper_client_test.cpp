/// The supervisor's side of ipc/links/keeper_link.h against a keeper that the test plays.

#include "supervisor/keeper_link/keeper_client.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cstring>

#include <gmock/gmock.h>

#include "tests/support/no_free_descriptor.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor {
namespace {

namespace wire = keeper_link;
using testing::HasSubstr;

SpawnRequest request_of(std::uint64_t generation) {
    SpawnRequest request;
    request.name = {"m", 0, generation};
    request.argv.emplace_back("/bin/worker");
    return request;
}

class KeeperClientTest : public testing::Test {
protected:
    KeeperClientTest() { connect(); }
    void connect() {
        closed_.clear();
        auto pair = PacketPair::make(true).value();
        keeper_ = std::move(pair.first);
        client_.emplace(io_, std::move(pair.second));
        client_->start({[this](const wire::KeeperHello& hello, std::vector<FoundWorker> found) {
                            ready_ = hello;
                            found_ = std::move(found);
                        },
                        [this] { ++stops_; }, [this] { ++reloads_; },
                        [this](const Error* why) { closed_ = why != nullptr ? why->text() : "end of file"; }});
    }

    template <typename... Body>
    void say(wire::Type type, std::uint64_t request_id, const std::vector<int>& fds, const Body&... body) {
        std::string bytes;
        const auto add = [&](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); };
        add(wire::Header{static_cast<std::uint16_t>(type), 1,
                         static_cast<std::uint32_t>(sizeof(wire::Header) + (sizeof body + ... + 0)), request_id});
        (add(body), ...);
        ASSERT_TRUE(send_packet(keeper_.get(), bytes, fds));
    }
    void greet(std::uint32_t workers = 0) {
        wire::KeeperHello hello{};
        hello.version_min = hello.version_max = 1;
        hello.worker_count = workers;
        hello.generation_last = 41;
        hello.keeper_pid = 7;
        say(wire::Type::hello, 0, {}, hello);
    }
    /// The next packet of the supervisor: its type and body.
    std::pair<wire::Type, std::string> heard() {
        std::pair<wire::Type, std::string> result{};
        EXPECT_TRUE(test::run_until(io_, [&] {
            std::array<std::byte, packet_bytes_max> buffer;
            Packet packet;
            const auto outcome = receive_packet(keeper_.get(), buffer, packet);
            if (!outcome || *outcome != ReceiveOutcome::packet) return false;
            wire::Header header{};
            std::memcpy(&header, packet.bytes.data(), sizeof header);
            EXPECT_EQ(header.size_bytes, packet.bytes.size());
            EXPECT_EQ(header.version, 1);
            last_request_ = header.request_id;
            fds_ = std::move(packet.fds);
            result = {static_cast<wire::Type>(header.type),
                      {reinterpret_cast<const char*>(packet.bytes.data()) + sizeof header,
                       packet.bytes.size() - sizeof header}};
            return true;
        }));
        return result;
    }
    template <typename T>
    static T as(const std::string& body) {
        T value{};
        EXPECT_GE(body.size(), sizeof value);
        std::memcpy(&value, body.data(), std::min(sizeof value, body.size()));
        return value;
    }

    boost::asio::io_context io_;
    UniqueFd keeper_;
    std::optional<KeeperClient> client_;
    std::optional<wire::KeeperHello> ready_;
    std::vector<FoundWorker> found_;
    int stops_ = 0, reloads_ = 0;
    std::string closed_;
    std::uint64_t last_request_ = 0;
    std::vector<UniqueFd> fds_;
};

TEST_F(KeeperClientTest, GreetsAndIsReadyWhenTheListOfWorkersHasEnded) {
    EXPECT_EQ(heard().first, wire::Type::supervisor_hello);
    greet();
    io_.poll();
    EXPECT_FALSE(ready_);
    say(wire::Type::hello_end, 0, {});
    ASSERT_TRUE(test::run_until(io_, [&] { return ready_.has_value(); }));
    EXPECT_EQ(ready_->generation_last, 41U);
}

TEST_F(KeeperClientTest, SpawnsWithExactlyWhatWasAskedFor) {
    heard();
    SpawnRequest request;
    request.name = {"minilm", 3, 42};
    request.argv = {"/bin/worker", ""};
    request.environment = {"A=1", "B=two words"};
    request.cgroup = UniqueFd{::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    request.core_bytes_max = 99;
    std::optional<SpawnedProcess> spawned;
    std::optional<ProcessExit> exited;
    client_->spawn(
        std::move(request), [&](Result<SpawnedProcess> result) { spawned = std::move(*result); },
        [&](const ProcessExit& exit) { exited = exit; });
    const auto [type, body] = heard();
    EXPECT_EQ(type, wire::Type::spawn);
    const auto spawn = as<wire::Spawn>(body);
    EXPECT_EQ(spawn.argv_count, 2U);
    EXPECT_EQ(spawn.environment_count, 2U);
    EXPECT_EQ(spawn.has_cgroup, 1U);
    EXPECT_EQ(fds_.size(), 1U);
    EXPECT_EQ(spawn.core_bytes_max, 99U);
    EXPECT_EQ(body.substr(sizeof spawn), std::string("/bin/worker\0\0A=1\0B=two words\0", 29));
    EXPECT_EQ(spawn.bytes, 29U);
    EXPECT_EQ(WorkerName::from(spawn.key), (WorkerName{"minilm", 3, 42}));

    say(wire::Type::spawned, last_request_, {0, 0, 0}, wire::Spawned{spawn.key, 1234, 0});
    ASSERT_TRUE(test::run_until(io_, [&] { return spawned.has_value(); }));
    EXPECT_EQ(spawned->pid, 1234);
    EXPECT_TRUE(spawned->pidfd && spawned->link && spawned->log);

    say(wire::Type::exited, 0, {},
        wire::Exited{spawn.key, 1234, static_cast<std::uint32_t>(wire::WorkerFate::killed_by_signal), SIGSEGV, 1});
    ASSERT_TRUE(test::run_until(io_, [&] { return exited.has_value(); }));
    EXPECT_EQ(exited->text(), "SIGSEGV");
    EXPECT_TRUE(exited->group_empty);

    client_->forget({"minilm", 3, 42});
    EXPECT_EQ(heard().first, wire::Type::forget);
}

TEST_F(KeeperClientTest, AFailedSpawnNamesTheStepAndTheError) {
    heard();
    const auto fail_at = [this](std::uint64_t generation, wire::SpawnStep step, std::int32_t number) {
        std::optional<Error> error;
        client_->spawn(
            request_of(generation), [&](Result<SpawnedProcess> result) { error = result.error(); },
            [](const ProcessExit&) { FAIL(); });
        heard();
        say(wire::Type::spawn_failed, last_request_, {},
            wire::SpawnFailed{WorkerName{"m", 0, generation}.key(), static_cast<std::uint32_t>(step), number});
        EXPECT_TRUE(test::run_until(io_, [&] { return error.has_value(); }));
        return *error;
    };
    EXPECT_THAT(fail_at(1, wire::SpawnStep::exec, ENOENT).attempt, HasSubstr("exec: No such file"));
    const Error full = fail_at(2, wire::SpawnStep::table_full, ENOSPC);
    EXPECT_EQ(full.code, ErrorCode::resources_exhausted);
    EXPECT_THAT(full.remedy, HasSubstr("256"));
}

TEST_F(KeeperClientTest, ASpawnWhoseDescriptorsCannotBeReceivedFailsWhenItsProcessIsGone) {
    heard();
    std::optional<Error> error;
    bool exited = false;
    client_->spawn(
        request_of(1), [&](Result<SpawnedProcess> result) { error = result.error(); },
        [&](const ProcessExit&) { exited = true; });
    heard();
    const auto key = WorkerName{"m", 0, 1}.key();
    say(wire::Type::spawned, last_request_, {0, 0, 0}, wire::Spawned{key, 1234, 0});
    {
        const bulkhead::test::NoFreeDescriptor none;
        io_.restart();
        io_.poll();
    }
    EXPECT_EQ(closed_, "") << "the link is whole";
    EXPECT_FALSE(error) << "it runs still: no other may be started beside it";
    const auto [type, body] = heard();
    EXPECT_EQ(type, wire::Type::signal);
    EXPECT_EQ(as<wire::Signal>(body).number, SIGKILL);
    EXPECT_EQ(as<wire::Signal>(body).whole_group, 1U);

    say(wire::Type::exited, 0, {},
        wire::Exited{key, 1234, static_cast<std::uint32_t>(wire::WorkerFate::killed_by_signal), SIGKILL, 1});
    ASSERT_TRUE(test::run_until(io_, [&] { return error.has_value(); }));
    EXPECT_EQ(error->code, ErrorCode::resources_exhausted);
    EXPECT_THAT(error->attempt, HasSubstr("starting a process for m/0"));
    EXPECT_THAT(error->remedy, HasSubstr("ulimit -n"));
    EXPECT_FALSE(exited);
    EXPECT_EQ(heard().first, wire::Type::forget);
}

wire::WorkerRecord record_of(const WorkerName& name, wire::WorkerFate fate, std::uint32_t ledger_bytes) {
    wire::WorkerRecord record{};
    record.key = name.key();
    record.pid = 99;
    record.fate = static_cast<std::uint32_t>(fate);
    record.ledger_bytes = ledger_bytes;
    return record;
}

TEST_F(KeeperClientTest, HandsOnWhatTheKeeperKeptOfFormerSupervisors) {
    heard();
    greet(3);
    say(wire::Type::worker, 0, {0, 0, 0}, record_of({"runs", 0, 40}, wire::WorkerFate::running, 2),
        std::array{'{', '}'});
    auto killed = record_of({"killed", 1, 39}, wire::WorkerFate::killed_by_signal, 0);
    killed.exit_number = SIGSEGV;
    killed.group_empty = 1;
    say(wire::Type::worker, 0, {0, 0}, killed);
    say(wire::Type::worker, 0, {}, record_of({"told", 0, 38}, wire::WorkerFate::exited, 0));
    EXPECT_FALSE(ready_);
    say(wire::Type::hello_end, 0, {});
    ASSERT_TRUE(test::run_until(io_, [&] { return ready_.has_value(); }));

    ASSERT_EQ(found_.size(), 3U);
    EXPECT_EQ(found_[0].name, (WorkerName{"runs", 0, 40}));
    EXPECT_EQ(found_[0].ledger, "{}");
    EXPECT_TRUE(found_[0].pidfd && found_[0].link && found_[0].log && !found_[0].exit);
    EXPECT_TRUE(!found_[1].pidfd && found_[1].link && found_[1].log);
    EXPECT_EQ(found_[1].exit->text(), "SIGSEGV");
    EXPECT_TRUE(found_[1].exit->group_empty);
    EXPECT_FALSE(found_[2].link);
    EXPECT_EQ(found_[2].exit->text(), "status 0");
}

TEST_F(KeeperClientTest, AFoundWorkerWhoseDescriptorsCannotBeReceivedIsHandedOnAsOneToEnd) {
    heard();
    greet(2);
    say(wire::Type::worker, 0, {0, 0, 0}, record_of({"lost", 0, 40}, wire::WorkerFate::running, 0));
    {
        const bulkhead::test::NoFreeDescriptor none;
        io_.restart();
        io_.poll();
    }
    say(wire::Type::worker, 0, {0, 0, 0}, record_of({"whole", 0, 41}, wire::WorkerFate::running, 0));
    say(wire::Type::hello_end, 0, {});
    ASSERT_TRUE(test::run_until(io_, [&] { return ready_.has_value(); }));

    ASSERT_EQ(found_.size(), 2U);
    EXPECT_EQ(found_[0].unreachable.value_or(Error{}).code, ErrorCode::resources_exhausted);
    EXPECT_FALSE(found_[0].link);
    EXPECT_FALSE(found_[1].unreachable);
    EXPECT_TRUE(found_[1].link);
}

TEST_F(KeeperClientTest, AnEndIsToldToWhoAdoptsLater) {
    heard();
    greet(1);
    const auto record = record_of({"runs", 0, 40}, wire::WorkerFate::running, 0);
    say(wire::Type::worker, 0, {0, 0, 0}, record);
    say(wire::Type::hello_end, 0, {});
    say(wire::Type::exited, 0, {},
        wire::Exited{record.key, 99, static_cast<std::uint32_t>(wire::WorkerFate::killed_by_signal), SIGKILL, 1});
    ASSERT_TRUE(test::run_until(io_, [&] { return ready_.has_value(); }));
    io_.poll();

    std::optional<ProcessExit> exit;
    client_->adopt({"runs", 0, 40}, [&](const ProcessExit& heard_exit) { exit = heard_exit; });
    EXPECT_FALSE(exit);
    ASSERT_TRUE(test::run_until(io_, [&] { return exit.has_value(); }));
    EXPECT_EQ(exit->text(), "SIGKILL");
}

TEST_F(KeeperClientTest, KeepsALedgerAndHandsOver) {
    heard();
    client_->keep({"m", 0, 7}, "{\"v\":1}");
    const auto [type, body] = heard();
    EXPECT_EQ(type, wire::Type::ledger);
    EXPECT_EQ(WorkerName::from(as<wire::WorkerKey>(body)), (WorkerName{"m", 0, 7}));
    EXPECT_EQ(body.substr(sizeof(wire::WorkerKey)), "{\"v\":1}");
    client_->hand_over(false);
    EXPECT_EQ(heard().first, wire::Type::hand_over);
    client_->hand_over(true);
    EXPECT_EQ(heard().first, wire::Type::upgrade);
}

TEST_F(KeeperClientTest, HearsThatItShallStopAndThatItsLinkHasEnded) {
    say(wire::Type::stop_asked, 0, {});
    say(wire::Type::reload_asked, 0, {});
    EXPECT_TRUE(test::run_until(io_, [&] { return stops_ == 1 && reloads_ == 1; }));
    heard();
    client_->stop();
    EXPECT_EQ(heard().first, wire::Type::stop);
    EXPECT_TRUE(client_->is_flushed());
    keeper_.reset();
    EXPECT_TRUE(test::run_until(io_, [&] { return closed_ == "end of file"; }));
}

TEST_F(KeeperClientTest, WhatNoKeeperOfThisReleaseSaysEndsTheLinkAndNothingElse) {
    const auto packet = [](wire::Type type, const auto& body) {
        const wire::Header header{static_cast<std::uint16_t>(type), 1, sizeof header + sizeof body, 0};
        return std::string{reinterpret_cast<const char*>(&header), sizeof header}.append(
            reinterpret_cast<const char*>(&body), sizeof body);
    };
    wire::KeeperHello later{};
    later.version_min = 5;
    later.version_max = 6;
    const int one = 0;
    struct Row {
        std::string bytes;
        const char* why = "protocol_violation";
        std::span<const int> fds{};
    };
    for (const auto& [bytes, why, fds] :
         {Row{"short"}, Row{std::string(16, '\0')},
          Row{std::string("\x01\0\x01\0\x10\0\0\0\0\0\0\0\0\0\0\0", 16)},
          Row{std::string("\x04\0\x01\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0", 16)},
          Row{packet(wire::Type::hello, later), "versions 5 to 6"},
          Row{packet(wire::Type::worker, record_of({"runs", 0, 40}, wire::WorkerFate::running, 0)),
              "a running worker with 1 descriptors", {&one, 1}}}) {
        connect();
        ASSERT_TRUE(send_packet(keeper_.get(), bytes, fds));
        ASSERT_TRUE(test::run_until(io_, [&] { return !closed_.empty(); }));
        EXPECT_THAT(closed_, HasSubstr("protocol_violation"));
        EXPECT_THAT(closed_, HasSubstr(why));
        EXPECT_FALSE(ready_);
    }
}

}  // namespace
}  // namespace bulkhead::supervisor
