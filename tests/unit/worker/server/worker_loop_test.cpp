#include <filesystem>
#include <fstream>
#include <map>

#include <fmt/format.h>

#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

using WorkerLoop = LoopTest;

// --- the link and the load

TEST_F(WorkerLoop, EndsWhileItWaitsForAGrantThatNeverComes) {
    load = [](const config::ModelSpec&, const LoadContext& context) -> Result<std::unique_ptr<Model>> {
        return context.wait_for_grant(1).error();
    };
    start_loading();
    expect_said("grant_asked");
    say({{"type", "drain"}, {"deadline_ms", 1000}});
    expect_exit();
}

TEST_F(WorkerLoop, TellsALoadsPartsAndItsLatestStepButFarFromAll) {
    load_after([this](const LoadContext& context) {
        for (std::uint64_t done = 0; done <= 10'000; ++done) context.progress("reading", done, 10'000, "bytes", "");
        for (std::uint64_t done = 0; done <= 2; ++done) context.progress("capturing", done, 2, "steps", "forward");
        for (std::uint64_t done = 0; done <= 1; ++done) context.progress("saving", done, 80, "steps", "");
        log->gate.pass();
        context.progress("saving", 2, 80, "steps", "");
    });
    start_loading();

    std::map<std::string, std::vector<std::uint64_t>> told;
    const auto read_until = [&](std::uint64_t saved) {
        while (told["saving"].empty() || told["saving"].back() != saved) {
            const boost::json::object report = expect_said("progress");
            ASSERT_FALSE(report.empty());
            told[std::string{report.at("phase").as_string()}].push_back(number(report, "done"));
        }
    };
    read_until(1);  // though no step follows it
    log->gate.open();
    read_until(2);  // at the load's end
    expect_said("ready");

    // What lies between may come as well, where there was time for it.
    EXPECT_LT(told["reading"].size(), 1'000U);
    EXPECT_TRUE(std::ranges::is_sorted(told["reading"]));
    const std::vector<std::uint64_t> parts{0, 1'250, 2'500, 3'750, 5'000, 6'250, 7'500, 8'750, 10'000};
    EXPECT_TRUE(std::ranges::includes(told["reading"], parts)) << testing::PrintToString(told["reading"]);
    EXPECT_EQ(told["capturing"], (std::vector<std::uint64_t>{0, 1, 2}));
}

struct FailedLoad {
    const char* name;
    ErrorCode code;
    std::string_view contents;  ///< of the file; empty: there is none
    int status;
};
constexpr std::string_view whole_archive = "PK\x03\x04 contents PK\x05\x06 and the end of the directory";
constexpr std::string_view cut_archive = "PK\x03\x04 contents";

class LoadFailure : public WorkerLoop, public testing::WithParamInterface<FailedLoad> {};

TEST_P(LoadFailure, IsToldAndSetsTheExitStatus) {
    const auto file = std::filesystem::temp_directory_path() / fmt::format("bulkhead-load-{}.pt", ::getpid());
    if (!GetParam().contents.empty()) std::ofstream{file} << GetParam().contents;
    spec.file = file;
    load = [](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
        return Error{GetParam().code, "loading the fake", "mend it"};
    };
    start_loading();

    const boost::json::object failed = expect_said("failed");
    EXPECT_EQ(failed.at("code").as_string(), to_string(GetParam().code));
    EXPECT_EQ(failed.at("attempt").as_string(), "loading the fake");
    EXPECT_EQ(failed.at("remedy").as_string(), "mend it");
    EXPECT_EQ(expect_exit(), GetParam().status);
    std::filesystem::remove(file);
}

INSTANTIATE_TEST_SUITE_P(Each, LoadFailure,
                         testing::Values(FailedLoad{"ConfigInvalid", ErrorCode::config_invalid, whole_archive, 78},
                                         FailedLoad{"PackageIncompatible", ErrorCode::package_incompatible,
                                                    whole_archive, 78},
                                         FailedLoad{"MissingFile", ErrorCode::load_failed, {}, 78},
                                         FailedLoad{"CutFile", ErrorCode::load_failed, cut_archive, 78},
                                         FailedLoad{"ModelThrows", ErrorCode::load_failed, whole_archive, 1},
                                         FailedLoad{"OutOfMemory", ErrorCode::out_of_memory, whole_archive, 1}),
                         [](const auto& param_info) { return std::string{param_info.param.name}; });

TEST_F(WorkerLoop, ReportsALoaderThatThrows) {
    load = [](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
        throw std::runtime_error{"its own words"};
    };
    start_loading();

    EXPECT_NE(std::string{expect_said("failed").at("attempt").as_string()}.find("its own words"), std::string::npos);
    expect_exit();
}

TEST_F(WorkerLoop, RefusesAConfigurationOfAnotherRelease) {
    start();

    say({{"type", "configure"}, {"protocol", 1}, {"device", "cpu"}, {"model", {{"name", "fake"}, {"colour", 3}}}});

    EXPECT_EQ(expect_said("failed").at("code").as_string(), "config_invalid");
    EXPECT_EQ(expect_exit(), 78);
}

class EndAmidLoad : public WorkerLoop {
protected:
    EndAmidLoad() {
        load_after([this](const LoadContext&) { log->gate.pass(); });
        start_loading();
        log->gate.await_arrivals(1);
    }
};

TEST_F(EndAmidLoad, ComesAtOnceWhenTheKeeperIsGone) {
    link.reset();
    EXPECT_EQ(expect_exit(), 1);
}

TEST_F(EndAmidLoad, ComesAtOnceByADrain) {
    say({{"type", "drain"}, {"deadline_ms", 20'000}});
    expect_said("drained");
    EXPECT_EQ(expect_exit(), 0);
}

// --- channels side by side

TEST_F(WorkerLoop, AStatefulModelIsResetForEachOfItsClientsInTurn) {
    make_stateful();
    start_ready();

    for (int turn = 1; turn <= 20; ++turn) {
        TestClient client = open_channel();  // right after the one before it closed: never busy
        client.echo(1);
        const std::lock_guard lock{log->mutex};
        EXPECT_EQ(log->resets, turn);
    }
}

TEST_F(WorkerLoop, AStatefulModelsNextClientWaitsForTheRequestOfOneThatIsGone) {
    make_stateful();
    TestClient first = first_channel();
    TestClient too_early = introduce();
    too_early.send(channel::encode(channel::Hello{0, "too early"}));
    too_early.expect_error(0, ErrorCode::busy);
    too_early.expect_end();
    const boost::json::object refused = expect_said("channel_refused");
    EXPECT_EQ(refused.at("code").as_string(), "busy");
    EXPECT_EQ(number(refused, "channel"), too_early.id);
    first.infer(1, "wait", {first.tensor({1})});
    log->gate.await_arrivals(1);
    first.close();
    TestClient second = introduce();
    TestClient third = introduce();

    second.send(channel::encode(channel::Hello{0, "second"}));
    EXPECT_EQ(number(statistics(), "in_flight"), 1U);
    third.send(channel::encode(channel::Hello{0, "third"}));
    third.expect_error(0, ErrorCode::busy);
    EXPECT_FALSE(second.has_message());
    log->gate.open();

    const auto welcome = second.receive();
    EXPECT_TRUE(welcome && std::holds_alternative<channel::Welcome>(*welcome));
    const std::lock_guard lock{log->mutex};
    EXPECT_EQ(log->resets, 2);
}

TEST_F(WorkerLoop, RefusesTheChannelWhenTheResetFails) {
    make_stateful();
    log->reset_error = Error{ErrorCode::inference_failed, "no reset today", {}};
    start_ready();
    TestClient client = introduce();

    client.send(channel::encode(channel::Hello{0, "x"}));

    EXPECT_NE(client.expect_error(0, ErrorCode::inference_failed).attempt.find("no reset today"), std::string::npos);
    client.expect_end();
    EXPECT_EQ(number(expect_said("channel_refused"), "channel"), client.id);
}

// --- the end

TEST_F(WorkerLoop, RefusesAChannelThatIsBeingOpenedWhenTheDrainBegins) {
    spec.channel = {.input_bytes = 24u << 20, .output_bytes = 24u << 20, .bytes_max = 64u << 20, .channels_max = 2};
    TestClient first = first_channel();
    first.infer(1, "wait", {first.tensor({1})});
    log->gate.await_arrivals(1);
    TestClient second = introduce();
    second.send(channel::encode(channel::Hello{0, "second"}));  // its slabs wait for the request
    statistics();

    say({{"type", "drain"}, {"deadline_ms", 20'000}});

    second.expect_error(0, ErrorCode::worker_draining);
    second.expect_end();
    EXPECT_EQ(number(expect_said("channel_refused"), "channel"), second.id);
    log->gate.open();
    expect_said("drained");
    EXPECT_EQ(expect_exit(), 0);
}

TEST_F(WorkerLoop, EndsWithAnErrorWhenTheDrainDeadlinePasses) {
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})});
    client.infer(2, "echo", {client.tensor({1}, 64)});
    log->gate.await_arrivals(1);

    say({{"type", "drain"}, {"deadline_ms", 600'000}});
    say({{"type", "drain"}, {"deadline_ms", 10}});  // the earlier one holds

    const auto closing = client.receive();
    EXPECT_TRUE(closing && std::holds_alternative<channel::Closing>(*closing));
    client.expect_error(2, ErrorCode::worker_draining);
    client.expect_error(1, ErrorCode::worker_draining);
    EXPECT_EQ(expect_exit(), 1);
    EXPECT_EQ(std::ranges::count(said, "drained"), 0);
}

TEST_F(WorkerLoop, FlushesAnswersToAClientThatReadsLate) {
    spec.queue_bound = 128;
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor({1});
    // More answers than its socket holds, fewer than the outbox takes.
    for (std::uint64_t id = 1; id <= 400; ++id) client.infer(id, "nothing", {input});
    await_statistics("requests", 400);

    say({{"type", "drain"}, {"deadline_ms", 20'000}});
    for (std::uint64_t id = 1; id <= 400; ++id) client.expect_error(id, ErrorCode::method_unknown);

    EXPECT_EQ(expect_exit(), 0);
}

}  // namespace
}  // namespace bulkhead::worker::test
