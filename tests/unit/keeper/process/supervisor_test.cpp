#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Exited;
using keeper_link::Signal;
using keeper_link::Type;
using keeper_link::WorkerFate;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using RunningSupervisor = Seated;

Seat kill_and_succeed(KeeperProcess& keeper, Seat seat) {
    seat.kill();
    EXPECT_TRUE(ends(seat.process()));
    return keeper.next_seat();
}

TEST(Supervisor, IsStartedWithItsArgumentsEnvironmentAndHandOver) {
    KeeperProcess keeper{{.environment = {"BULKHEAD_SOCKET=/elsewhere", "KEPT=1"}}};
    Seat seat = keeper.next_seat();

    const HandOver all = seat.take_over();

    EXPECT_EQ(all.hello.keeper_pid, keeper.pid());
    EXPECT_EQ(all.hello.supervisor_starts, 1U);
    EXPECT_EQ(all.hello.generation_last, 0U);
    EXPECT_EQ(all.hello.worker_count, 0U);
    EXPECT_THAT(all.workers, IsEmpty());
    EXPECT_THAT(
        words_of(seat.pid(), "cmdline"),
        ElementsAre("bulkhead-supervisor", "--socket", keeper.socket().string(), (keeper.folder / "relay").string()));
    const auto environment = words_of(seat.pid(), "environ");
    EXPECT_THAT(environment, Contains("BULKHEAD_SOCKET=" + keeper.socket().string()));
    EXPECT_THAT(environment, Contains("KEPT=1"));
    EXPECT_THAT(environment, ::testing::Not(Contains("BULKHEAD_SOCKET=/elsewhere")));
}

TEST_F(RunningSupervisor, ThatIsKilledIsRestartedAndGetsTheSameWorkersAsTheyAre) {
    const WorkerSeen first = seat.spawn_fake(1);
    const WorkerSeen second = seat.spawn_fake(2);
    const std::string blob = std::string{"blob\0with\xff bytes", 16};
    seat.say(Type::ledger, first.key, "replaced");
    seat.say(Type::ledger, first.key, blob);
    seat.say(Type::ledger, second.key, std::string(keeper_link::ledger_bytes_max, 'L'));
    seat.settle(3);
    second.tell("print said while nobody listened");
    second.tell("echo unread");
    ASSERT_TRUE(readable(second.log.get()));
    ASSERT_TRUE(readable(second.link.get()));

    Seat next = kill_and_succeed(keeper, std::move(seat));
    const HandOver all = next.take_over();

    EXPECT_EQ(all.hello.supervisor_starts, 2U);
    EXPECT_EQ(all.hello.generation_last, 3U);
    ASSERT_EQ(all.workers.size(), 2U);
    EXPECT_EQ(all.hello.worker_count, 2U);
    EXPECT_EQ(all.workers[0].worker.key, first.key);
    EXPECT_EQ(all.workers[0].worker.pid, first.pid);
    EXPECT_EQ(all.workers[0].record.fate, static_cast<std::uint32_t>(WorkerFate::running));
    EXPECT_EQ(all.workers[0].ledger, blob);
    EXPECT_EQ(all.workers[1].ledger, std::string(keeper_link::ledger_bytes_max, 'L'));
    EXPECT_EQ(all.workers[0].worker.ask("echo still here"), "still here");
    EXPECT_EQ(all.workers[1].worker.ask("echo me, too"), "unread");
    char text[64] = {};
    EXPECT_GT(::read(all.workers[1].worker.log.get(), text, sizeof text - 1), 0);
    EXPECT_STREQ(text, "said while nobody listened");
    EXPECT_TRUE(is_alive(all.workers[0].worker.pidfd));

    next.say(Type::signal, Signal{second.key, SIGTERM, 0});
    EXPECT_EQ(next.hear<Exited>(Type::exited).key, second.key);
}

TEST_F(RunningSupervisor, ThatRanForASecondIsSucceededAtOnceThoughOthersEndedBeforeIt) {
    seat = kill_and_succeed(keeper, std::move(seat));
    seat.take_over();
    // The supervisor lives longer.
    const WorkerSeen worker = seat.spawn(key_of("m", 1), {"/bin/sleep", "1"});
    (void)seat.hear<Exited>(Type::exited);

    (void)kill_and_succeed(keeper, std::move(seat));

    EXPECT_THAT(keeper.errors(), HasSubstr("start=3 in=0ms"));
}

TEST_F(RunningSupervisor, ReceivesTheDeadThatWereNotForgotten) {
    const WorkerSeen worker = seat.spawn_fake(1);
    worker.tell("exit 42");
    (void)seat.hear<Exited>(Type::exited);

    Seat next = kill_and_succeed(keeper, std::move(seat));
    const HandOver all = next.take_over();

    ASSERT_EQ(all.workers.size(), 1U);
    EXPECT_EQ(all.workers[0].record.fate, static_cast<std::uint32_t>(WorkerFate::exited));
    EXPECT_EQ(all.workers[0].record.exit_number, 42);
    EXPECT_EQ(all.workers[0].record.group_empty, 1U);
    EXPECT_FALSE(all.workers[0].worker.pidfd) << "a dead one brings no descriptors";
    next.say(Type::forget, worker.key);
    next.settle(2);

    EXPECT_THAT(kill_and_succeed(keeper, std::move(next)).take_over().workers, IsEmpty());
}

TEST_F(RunningSupervisor, SpawnsAndEndsThatItDoesNotReadAreNotLost) {
    for (std::uint64_t generation = 1; generation <= 200; ++generation)
        seat.ask_spawn(key_of("m", generation), {"/bin/true"});

    int spawned = 0, exited = 0;
    while (spawned + exited < 400) {
        const Heard heard = seat.hear();
        spawned += heard.is(Type::spawned) ? 1 : 0;
        exited += heard.is(Type::exited) ? 1 : 0;
        EXPECT_LE(exited, spawned) << "no end before its beginning";
    }
    EXPECT_EQ(spawned, 200);
}

TEST_F(RunningSupervisor, ConnectionsWaitWhileItRestarts) {
    seat.kill();
    EXPECT_TRUE(ends(seat.process()));

    const UniqueFd client = unix_client(keeper.socket());
    ASSERT_TRUE(client);

    Seat next = keeper.next_seat();
    ASSERT_TRUE(readable(next.listening().get()));
    EXPECT_GE(UniqueFd{::accept4(next.listening().get(), nullptr, nullptr, SOCK_CLOEXEC)}.get(), 0);
}

TEST(Supervisor, ThatEndsBeforeItsFirstHelloEndsTheKeeper) {
    struct Row {
        const char* program;
        int status;
        const char* why;
    };
    for (const auto& [program, status, why] :
         {Row{FAKE_SUPERVISOR, 78, ""},  // its configuration is invalid, which it has said itself
          Row{"/bin/false", 1, "ended code=1 before its first hello"},
          Row{"/no/such", 1, "starting /no/such: No such file or directory; name the program with --supervisor"}}) {
        const Folder folder;
        const Ended ended =
            run_keeper({"--socket", folder / "run/control.sock", "--supervisor", program, "missing.yaml"});
        EXPECT_EQ(ended.status, status) << program;
        EXPECT_THAT(ended.errors, HasSubstr(why));
        EXPECT_EQ(ended.errors.empty(), *why == '\0') << ended.errors;
        EXPECT_FALSE(std::filesystem::exists(folder / "run/control.sock"));
    }
}

TEST_F(RunningSupervisor, WhoseConfigurationIsInvalidLaterIsTriedAgain) {
    const WorkerSeen worker = seat.spawn_fake(1);

    seat.end_with(78);

    EXPECT_EQ(keeper.next_seat().take_over().workers.size(), 1U);
    EXPECT_EQ(worker.ask("echo alive"), "alive");
}

TEST(Supervisor, OfAnotherProtocolVersionEndsTheKeeperAtFirst) {
    KeeperProcess keeper;
    Seat seat = keeper.next_seat();
    seat.receive_hand_over();

    seat.greet(7, 9);

    EXPECT_EQ(keeper.wait(), 1);
    EXPECT_THAT(keeper.errors(), HasSubstr("it speaks versions 7 to 9, this keeper 1 to 1; install bulkheadd and"));
}

TEST_F(RunningSupervisor, OfAnotherProtocolVersionLaterCostsNoWorker) {
    const WorkerSeen worker = seat.spawn_fake(1);
    Seat next = kill_and_succeed(keeper, std::move(seat));
    next.receive_hand_over();

    next.greet(2, 2);

    EXPECT_TRUE(ends(next.process()));
    EXPECT_EQ(keeper.next_seat().take_over().workers.size(), 1U);
    EXPECT_EQ(worker.ask("echo alive"), "alive");
}

TEST(Supervisor, OfALaterReleaseIsSpokenToInTheVersionBothKnow) {
    KeeperProcess keeper;
    Seat seat = keeper.next_seat();
    seat.receive_hand_over();

    seat.greet(1, 9);

    EXPECT_EQ(seat.spawn_fake(1).ask("echo fine"), "fine");
}

TEST_F(RunningSupervisor, ThatDoesNotReadWhatItWasToldIsKilled) {
    const WorkerSeen dead = seat.spawn_fake(1);
    const WorkerSeen alive = seat.spawn_fake(2);
    dead.tell("exit 3");
    ASSERT_TRUE(ends(dead.pidfd));

    ASSERT_TRUE(ends(seat.process()));

    Seat next = keeper.next_seat();
    const HandOver all = next.take_over();
    ASSERT_EQ(all.workers.size(), 2U);
    EXPECT_EQ(all.workers[0].record.exit_number, 3);
    EXPECT_EQ(all.workers[1].worker.ask("echo here"), "here");
    EXPECT_THAT(keeper.errors(), HasSubstr("it hangs: it has not read its link for 10 s"));
}

TEST_F(RunningSupervisor, ThatClosesItsLinkAndLivesOnIsKilled) {
    ::shutdown(seat.link().get(), SHUT_RDWR);

    EXPECT_TRUE(ends(seat.process()));
    EXPECT_THAT(keeper.next_seat().take_over().workers, IsEmpty());
}

/// What no sane supervisor sends. Each ends that supervisor and no worker.
struct Nonsense {
    const char* name;
    void (*send)(Seat&);
};

keeper_link::Spawn spawn_body(std::uint64_t generation, std::uint32_t argv_count, std::uint32_t bytes) {
    keeper_link::Spawn body{};
    body.key = key_of("m", generation);
    body.argv_count = argv_count;
    body.bytes = bytes;
    return body;
}

void say_header(Seat& seat, const keeper_link::Header& header) {
    seat.say_raw({reinterpret_cast<const char*>(&header), sizeof header});
}

const Nonsense nonsense[] = {
    {"AHalfHeader", [](Seat& seat) { seat.say_raw("short"); }},
    {"AWrongSize", [](Seat& seat) { say_header(seat, {33, 1, 0xFFFF'FFFF, 0}); }},
    {"AnotherVersion", [](Seat& seat) { say_header(seat, {37, 2, sizeof(keeper_link::Header), 0}); }},
    {"AnUnknownType", [](Seat& seat) { seat.say(static_cast<Type>(999)); }},
    {"AKeepersType", [](Seat& seat) { seat.say(Type::hello_end); }},
    {"ASecondHello", [](Seat& seat) { seat.greet(); }},
    {"ATooLongPacket", [](Seat& seat) { seat.say(Type::spawn, std::string(60 * 1024, 'x')); }},
    {"ASpawnOfAnOldGeneration", [](Seat& seat) { seat.ask_spawn(key_of("m", 1), {FAKE_WORKER}); }},
    {"ASpawnWithoutAName", [](Seat& seat) { seat.ask_spawn(key_of("", 9), {FAKE_WORKER}); }},
    {"ASpawnWithoutAProgram", [](Seat& seat) { seat.ask_spawn(key_of("m", 9), {}); }},
    {"ASpawnWithFewerStringsThanItSays",
     [](Seat& seat) { seat.say(Type::spawn, spawn_body(9, 3, 4), std::string_view{"/a\0b", 4}); }},
    {"ASpawnWhoseLastStringHasNoEnd",
     [](Seat& seat) { seat.say(Type::spawn, spawn_body(9, 1, 4), std::string_view{"/a\0b", 4}); }},
    {"ASpawnShorterThanItSays",
     [](Seat& seat) { seat.say(Type::spawn, spawn_body(9, 1, 400), std::string_view{"/a\0", 3}); }},
    {"ASpawnWithCountsThatOverflow",
     [](Seat& seat) {
         auto body = spawn_body(9, 0xFFFF'FFFF, 3);
         body.environment_count = 2;  // together 1 in 32 bits
         seat.say(Type::spawn, body, std::string_view{"/a\0", 3});
     }},
    {"ASpawnWithADescriptorItDoesNotMention",
     [](Seat& seat) {
         const auto body = spawn_body(9, 1, 3);
         const auto bytes = std::string{reinterpret_cast<const char*>(&body), sizeof body}.append("/a\0", 3);
         const int fd = seat.link().get();
         seat.say(Type::spawn, bytes, 9, std::span{&fd, 1});
     }},
    {"MoreDescriptorsThanAPacketMayBring",
     [](Seat& seat) {
         const std::vector<int> fds(16, seat.link().get());
         seat.say(Type::stop, {}, 0, fds);
     }},
    {"ASignalNumberThatIsNone", [](Seat& seat) { seat.say(Type::signal, Signal{key_of("fake", 1), 65, 0}); }},
    {"ASignalToNobody", [](Seat& seat) { seat.say(Type::signal, Signal{key_of("nobody", 1), SIGTERM, 0}); }},
    {"ALedgerOfNobody", [](Seat& seat) { seat.say(Type::ledger, key_of("nobody", 1)); }},
    {"ALedgerThatIsTooLong",
     [](Seat& seat) {
         seat.say(Type::ledger, key_of("fake", 1), std::string(keeper_link::ledger_bytes_max + 1, 'x'));
     }},
    {"AForgetOfALivingWorker", [](Seat& seat) { seat.say(Type::forget, key_of("fake", 1)); }},
};

class Violation : public ::testing::TestWithParam<Nonsense> {};

TEST_P(Violation, EndsTheSupervisorAndNoWorker) {
    SeatedKeeper daemon;
    auto& [keeper, seat] = daemon;
    const WorkerSeen worker = seat.spawn_fake(1);
    seat.settle(2);
    const std::size_t before = descriptor_count(keeper.pid());

    GetParam().send(seat);

    EXPECT_TRUE(ends(seat.process()));
    Seat next = keeper.next_seat();
    const HandOver all = next.take_over();
    ASSERT_EQ(all.workers.size(), 1U);
    EXPECT_EQ(worker.ask("echo alive"), "alive");
    EXPECT_THAT(keeper.errors(), HasSubstr("error: protocol_violation: reading the supervisor's link: "));
    next.settle(1000);
    EXPECT_EQ(descriptor_count(keeper.pid()), before);
}

INSTANTIATE_TEST_SUITE_P(Of, Violation, ::testing::ValuesIn(nonsense),
                         [](const auto& case_) { return std::string{case_.param.name}; });

TEST(Supervisor, ThatAsksBeforeItsHelloIsKilled) {
    KeeperProcess keeper;
    Seat seat = keeper.next_seat();
    seat.receive_hand_over();

    seat.ask_spawn(key_of("m", 1), {FAKE_WORKER});

    EXPECT_TRUE(ends(seat.process()));
    EXPECT_EQ(keeper.next_seat().take_over().hello.generation_last, 0U) << "and nothing was spawned";
}

}  // namespace
}  // namespace bulkhead::test
