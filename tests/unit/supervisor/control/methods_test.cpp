/// The methods of docs/control.md over a real socket, with a fleet whose workers the test plays.

#include "supervisor/control/methods.h"

#include <gmock/gmock.h>

#include "ipc/links/control_methods.h"
#include "supervisor/base/limits.h"
#include "supervisor/control/control_server.h"
#include "tests/unit/supervisor/control_client.h"
#include "tests/unit/supervisor/fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using test::ControlClient;
using test::FakeWorker;
using testing::HasSubstr;

std::vector<config::ModelSpec> two_models() {
    config::ModelSpec b = test::spec_of("b");
    b.replicas = b.replicas_min = 2;
    return {test::spec_of("a"), b};
}

std::string code_of(const json::object& answer) {
    if (!answer.contains("error")) return "no error: " + json::serialize(answer);
    return std::string{answer.at("error").at("data").at("code").as_string()};
}

class MethodsTest : public test::FleetFixture {
protected:
    MethodsTest() {
        ::setenv("BULKHEAD_NVML", "/no/such/library", 1);
        declare(two_models());
        daemon_.emplace(Daemon{*fleet_,
                               {{}, "/run/s", "/fleet.yaml", "process group and marker"},
                               [this](auto stopped) { fleet_->stop(std::move(stopped)); }});
        server_.emplace(io_, listener_.take(), make_methods(*daemon_));
        server_->start();
    }
    ControlClient connect() { return {io_, listener_.connect()}; }

    /// Every worker that was asked for becomes ready.
    void make_ready(std::size_t count) {
        ASSERT_TRUE(wait([&] { return keeper_.workers.size() == count; }));
        for (auto& worker : keeper_.workers) {
            if (worker->reaped) continue;
            worker->hello();
            ASSERT_TRUE(wait([&] { return worker->got("configure"); }));
            worker->ready();
        }
    }
    void load(ControlClient& client, const std::string& model, std::size_t replicas) {
        client.ask(1, "model.load", {{"model", model}});
        make_ready(replicas);
        EXPECT_TRUE(client.answer().contains("result"));
    }
    void drain_and_exit(FakeWorker& worker) {
        ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
        worker.say({{"type", "drained"}});
        keeper_.exit(worker, {false, 0, true});
    }

    std::optional<Daemon> daemon_;
    test::Listener listener_;
    std::optional<ControlServer> server_;
};

TEST_F(MethodsTest, AreThoseThatClientsKnow) {
    std::vector<std::string_view> known, served;
    for (const auto& [name, repeat] : control::methods) known.push_back(name);
    const rpc::MethodTable table = make_methods(*daemon_);
    for (const auto& [name, method] : table) served.push_back(name);
    EXPECT_EQ(served, known) << "ipc/links/control.json has them in the order of their names";
}

TEST_F(MethodsTest, StatusHasOneRowAReplicaWithExactlyTheDocumentedMembers) {
    auto client = connect();
    const auto rows = client.call("fleet.status").at("result").at("models").as_array();
    ASSERT_EQ(rows.size(), 3U);
    std::vector<std::string> members;
    for (const auto& [name, value] : rows[0].as_object()) members.emplace_back(name);
    EXPECT_THAT(members, testing::UnorderedElementsAre("model", "replica", "state", "pid", "device", "host_bytes",
                                                       "gpu_bytes", "memory", "memory_bound", "requests", "errors",
                                                       "restarts", "generation", "in_flight", "queued", "channels",
                                                       "ignored_frames", "note", "graphs", "generate", "since",
                                                       "request_ms", "pinned", "waiting", "unload_at", "near"));
    EXPECT_EQ(rows[0].at("state").as_string(), "stopped");
    EXPECT_TRUE(rows[0].at("pid").is_null() && rows[0].at("host_bytes").is_null() && rows[0].at("gpu_bytes").is_null());
    EXPECT_EQ(rows[2].at("model").as_string(), "b");
    EXPECT_EQ(rows[2].at("replica").to_number<int>(), 1);

    load(client, "a", 1);
    const auto loaded = client.call("fleet.status").at("result").at("models").at(0).as_object();
    EXPECT_EQ(loaded.at("state").as_string(), "ready") << "though its worker does not answer";
    EXPECT_EQ(loaded.at("pid").to_number<int>(), keeper_.latest().pid);
    EXPECT_TRUE(keeper_.latest().got("statistics_asked"));
}

TEST_F(MethodsTest, LoadAnswersWhenAllAreReadyAndUnloadWithAReceiptEach) {
    auto client = connect();
    client.ask(1, "model.load", {{"all", true}});
    make_ready(3);
    const auto loaded = client.answer().at("result").at("models").as_array();
    ASSERT_EQ(loaded.size(), 3U);
    EXPECT_EQ(loaded[0].at("state").as_string(), "ready");
    EXPECT_TRUE(loaded[0].at("ms").is_number());

    client.ask(2, "model.unload", {{"models", json::array{"b", "a", "b"}}});
    for (auto& worker : keeper_.workers) drain_and_exit(*worker);
    const auto receipts = client.answer().at("result").at("receipts").as_array();
    ASSERT_EQ(receipts.size(), 3U);
    EXPECT_EQ(receipts[0].at("model").as_string(), "b");
    EXPECT_EQ(receipts[0].at("ended").as_string(), "drained");
    EXPECT_EQ(receipts[0].at("exit"), json::value({{"code", 0}}));
    EXPECT_TRUE(receipts[0].at("verified").as_bool());
    EXPECT_TRUE(receipts[0].at("held_by").as_array().empty());

    EXPECT_TRUE(client.call("model.unload", {{"all", true}}).at("result").at("receipts").as_array().empty());
}

TEST_F(MethodsTest, TheFirstFailureIsTheAnswerOfALoad) {
    auto client = connect();
    client.ask(1, "model.load", {{"all", true}});
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 3; }));
    FakeWorker& worker = *keeper_.workers[1];
    worker.hello();
    ASSERT_TRUE(wait([&] { return worker.got("configure"); }));
    worker.say({{"type", "failed"}, {"code", "load_failed"}, {"attempt", "opening x.pt"}, {"remedy", ""}});
    EXPECT_EQ(code_of(client.answer()), "load_failed");
}

TEST_F(MethodsTest, WrongParametersAreNamed) {
    auto client = connect();
    const std::vector<std::pair<std::string, json::object>> calls{
        {"model.load", {}},
        {"model.load", {{"model", "a"}, {"all", true}}},
        {"model.load", {{"model", 7}}},
        {"model.load", {{"models", json::array{}}}},
        {"model.load", {{"models", json::array{7}}}},
        {"model.load", {{"modle", "a"}}},
        {"model.load", {{"model", "a"}, {"deadline_ms", -1}}},
        {"model.load", {{"model", "a"}, {"deadline_ms", "soon"}}},
        {"model.why", {}},
        {"channel.open", {{"model", "a"}}},
        {"channel.open", {{"model", "a"}, {"client", std::string(48, 'x')}}},
        {"channel.open", {{"model", "a"}, {"client", "a\nb"}}},
        {"logs.tail", {{"model", "a"}, {"lines", 1e9}}},
        {"logs.tail", {{"model", "a"}, {"follow", "yes"}}},
        {"crashes.list", {{"limt", 1}}},
        {"crashes.list", {{"limit", 65}}},
        {"fleet.status", {{"verbose", true}}},
        {"daemon.stop", {{"now", true}}},
    };
    for (const auto& [method, params] : calls) {
        const auto answer = client.call(method, params);
        EXPECT_EQ(code_of(answer), "input_invalid") << method << " " << json::serialize(params);
        if (answer.contains("error")) {
            EXPECT_EQ(answer.at("error").at("code").to_number<int>(), -32602);
        }
    }
    for (const char* method : {"model.load", "model.unload", "model.restart", "model.why"}) {
        const auto answer = client.call(method, {{"model", "c"}});
        EXPECT_EQ(code_of(answer), "model_unknown");
        EXPECT_THAT(std::string{answer.at("error").at("data").at("remedy").as_string()}, HasSubstr("a, b"));
    }
}

TEST_F(MethodsTest, WhyTellsTheReasonInASentence) {
    auto client = connect();
    const auto why = client.call("model.why", {{"model", "b"}}).at("result").as_object();
    EXPECT_EQ(why.at("state").as_string(), "stopped");
    EXPECT_THAT(std::string{why.at("sentence").as_string()}, HasSubstr("no client has asked for it"));
    EXPECT_EQ(why.at("replicas").as_array().size(), 2U);
    EXPECT_TRUE(why.at("replicas").at(0).at("last_exit").is_null());
}

TEST_F(MethodsTest, AChannelIsAPairWhoseOtherEndTheWorkerHas) {
    auto client = connect();
    client.ask(1, "channel.open", {{"model", "a"}, {"client", "test"}});  // loads it
    make_ready(1);
    const auto opened = client.answer().at("result").as_object();
    EXPECT_EQ(opened.at("fds").to_number<int>(), 1);
    EXPECT_EQ(opened.at("pid").to_number<int>(), keeper_.latest().pid);
    ASSERT_EQ(client.fds.size(), 1U);

    FakeWorker& worker = keeper_.latest();
    ASSERT_TRUE(wait([&] { return worker.got("channel"); }));
    const auto told = std::find_if(worker.received.begin(), worker.received.end(),
                                   [](const auto& one) { return one.at("type").as_string() == "channel"; });
    EXPECT_EQ(told->at("channel"), opened.at("channel"));
    EXPECT_EQ(told->at("client_pid").to_number<int>(), ::getpid());
    ASSERT_TRUE(send_packet(client.fds[0].get(), std::string_view{"hello"}));
    std::array<std::byte, packet_bytes_max> buffer;
    Packet packet;
    ASSERT_EQ(receive_packet(worker.channels[0].get(), buffer, packet).value(), ReceiveOutcome::packet);
    EXPECT_EQ(packet.bytes.size(), 5U);
}

TEST_F(MethodsTest, ChannelOpenNeitherUndoesAnUnloadNorLiftsAQuarantine) {
    auto client = connect();
    load(client, "a", 1);
    client.ask(2, "model.unload", {{"model", "a"}});
    ASSERT_TRUE(wait([&] { return keeper_.latest().got("drain"); }));
    auto other = connect();
    EXPECT_EQ(code_of(other.call("channel.open", {{"model", "a"}, {"client", "x"}})), "worker_draining");
    drain_and_exit(keeper_.latest());
    EXPECT_TRUE(client.answer().contains("result"));

    client.ask(3, "model.load", {{"model", "a"}});
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 2; }));
    keeper_.exit(keeper_.latest(), {false, 78, true});
    EXPECT_EQ(code_of(client.answer()), "load_failed");
    ASSERT_TRUE(wait(
        [&] { return fleet_->find("a").value()->replicas[0]->state() == WorkerState::quarantined; }));
    EXPECT_EQ(code_of(client.call("channel.open", {{"model", "a"}, {"client", "x"}})), "model_quarantined");
}

TEST_F(MethodsTest, RestartGivesReceiptsAndANewProcess) {
    auto client = connect();
    load(client, "a", 1);
    client.ask(2, "model.restart", {{"model", "a"}});
    drain_and_exit(*keeper_.workers[0]);
    make_ready(2);
    const auto result = client.answer().at("result").as_object();
    EXPECT_EQ(result.at("receipts").as_array().size(), 1U);
    EXPECT_EQ(result.at("models").at(0).at("pid").to_number<int>(), keeper_.workers[1]->pid);
}

TEST_F(MethodsTest, SubscribersSeeStatesProgressAndReceiptsOfTheirModels) {
    auto client = connect();
    EXPECT_EQ(code_of(client.call("events.subscribe", {{"models", json::array{"nobody"}}})), "model_unknown");
    EXPECT_TRUE(
        client.call("events.subscribe", {{"models", json::array{"a"}}}).at("result").at("subscribed").as_bool());
    client.call("events.subscribe", {{"models", json::array{"b"}}});
    // In the place of the former two.
    client.call("events.subscribe", {{"models", json::array{"a"}}});

    auto other = connect();
    other.ask(1, "model.load", {{"all", true}});
    make_ready(3);
    EXPECT_TRUE(other.answer().contains("result"));
    std::vector<std::string> states;
    while (states.empty() || states.back() != "ready") {
        const auto event = client.answer();
        EXPECT_EQ(event.at("method").as_string(), "event");
        const auto& params = event.at("params").as_object();
        EXPECT_EQ(params.at("model").as_string(), "a");
        EXPECT_TRUE(params.at("time").is_int64() && params.contains("generation") && params.contains("reason"));
        states.emplace_back(params.at("to").as_string());
    }
    EXPECT_THAT(states, testing::ElementsAre("spawning", "loading", "ready"));
}

TEST_F(MethodsTest, LogsAreTailedAndFollowed) {
    auto client = connect();
    load(client, "a", 1);
    keeper_.latest().print("one\ntwo \x1b[2J\n");
    Model& model = *fleet_->find("a").value();
    ASSERT_TRUE(wait([&] { return model.log.last_line(0, 1).starts_with("two"); }));
    const auto lines =
        client.call("logs.tail", {{"model", "a"}, {"lines", 1}, {"follow", true}}).at("result").at("lines").as_array();
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0].at("text").as_string(), "two \\x1b[2J");
    EXPECT_EQ(lines[0].at("stream").as_string(), "output");
    client.call("logs.tail", {{"model", "a"}, {"lines", 1}, {"follow", true}});  // once is enough

    keeper_.latest().print("three\nfour\n");
    const auto followed = client.answer();
    EXPECT_EQ(followed.at("method").as_string(), "log");
    EXPECT_EQ(followed.at("params").at("text").as_string(), "three");
    EXPECT_EQ(followed.at("params").at("model").as_string(), "a");
    EXPECT_EQ(client.answer().at("params").at("text").as_string(), "four");
}

TEST_F(MethodsTest, AModelThatIsStoppedIsNotCalledChangedByWhatItWasLoadedFrom) {
    auto client = connect();
    const std::map<std::string, std::string> today{{"a", "another"}, {"b", "another"}};
    load(client, "a", 1);
    EXPECT_THAT(fleet_->compare(declared_, today).changed, testing::ElementsAre("a")) << "it runs with something else";

    client.ask(2, "model.unload", {{"model", "a"}});
    drain_and_exit(*keeper_.workers[0]);
    EXPECT_TRUE(client.answer().contains("result"));

    EXPECT_TRUE(fleet_->compare(declared_, today).is_nothing());
}

TEST_F(MethodsTest, WithoutNvmlGpuStatusSaysWhy) {
    auto client = connect();
    const auto status = client.call("gpu.status").at("result").as_object();
    EXPECT_FALSE(status.at("nvml").as_bool());
    EXPECT_THAT(std::string{status.at("reason").as_string()}, HasSubstr("/no/such/library"));
    EXPECT_TRUE(status.at("gpus").as_array().empty());
}

TEST_F(MethodsTest, InfoHasExactlyTheDocumentedMembers) {
    auto client = connect();
    const auto info = client.call("daemon.info").at("result").as_object();
    std::vector<std::string> members;
    for (const auto& [name, value] : info) members.emplace_back(name);
    EXPECT_THAT(members, testing::UnorderedElementsAre("version", "keeper_pid", "supervisor_pid", "socket", "fleet",
                                                       "uptime_s", "torch", "gpus", "containment", "supervisor_starts",
                                                       "keeper_executions", "keeper_upgrade_failed", "blanks",
                                                       "adopted", "log_lines_lost", "fleet_error", "models"));
    EXPECT_TRUE(info.at("torch").is_null());
    EXPECT_EQ(info.at("models").at(1).at("name").as_string(), "b");
}

TEST_F(MethodsTest, StopUnloadsEverythingAndLoadsNothingMore) {
    auto client = connect();
    load(client, "a", 1);
    client.ask(2, "daemon.stop");
    ASSERT_TRUE(wait([&] { return keeper_.latest().got("drain"); }));
    auto other = connect();
    EXPECT_EQ(code_of(other.call("model.load", {{"model", "b"}})), "worker_draining");
    EXPECT_EQ(code_of(other.call("channel.open", {{"model", "b"}, {"client", "x"}})), "worker_draining");
    drain_and_exit(keeper_.latest());
    EXPECT_EQ(client.answer().at("result").at("receipts").as_array().size(), 1U);
}

}  // namespace
}  // namespace bulkhead::supervisor
