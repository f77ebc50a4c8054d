#include "supervisor/replica/replica_record.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ipc/links/keeper_link.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;

void write(const std::filesystem::path& path, const std::string& content) { std::ofstream{path} << content; }

ReplicaRecord full() {
    ReplicaRecord record;
    record.declaration = "0123456789abcdef:0123456789abcdef";
    record.device = "cuda:15";
    record.gpu_uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef";
    record.has_cgroup = record.granted = record.keep_running = true;
    record.end_asked = EndAsked::replacement;
    record.settled = ReplicaRecord::Settled::backoff;
    record.eager = "capture crashed with SIGSEGV";
    record.ready_unix_ms = record.end_began_unix_ms = record.restart_due_unix_ms = 1'700'000'000'000;
    record.capturing = record.aborted = true;
    record.escalation = Escalation::sigkill;
    record.host_bytes = record.gpu_free_before = record.requests = record.errors = UINT64_MAX;
    record.adoptions_tried = 2;
    record.restarts = UINT32_MAX;
    record.crashes.ready_before = {0ms, 0ms, 0ms, 299'999ms};
    record.gave_up_by_count = true;
    record.ready_before_withdrawn = 299'999ms;
    for (int i = 0; i < 5; ++i) record.on_gpu.push_back({record.gpu_uuid, 1'700'000'000'000 + 10'000 * i});
    record.reason = "forward ran 31.0 s, budget 30.0 s";
    record.last_crash = LastCrash{41,
                                  5239,
                                  true,
                                  6,
                                  1'700'000'000'000,
                                  "it does not answer, for 5.0 s now (SIGABRT)",
                                  "1700000000000-a-model-with-a-long-name-0-41.json",
                                  true,
                                  "writing a crash report: No space left on device"};
    return record;
}

TEST(ReplicaRecord, ReadsBackWhatWasWritten) {
    EXPECT_EQ(ReplicaRecord::parse(full().to_text()).value(), full());
    EXPECT_EQ(ReplicaRecord::parse(ReplicaRecord{}.to_text()).value(), ReplicaRecord{});
    ReplicaRecord planned;
    planned.held = HeldMemory{true, 4, 2, 1, 3};
    EXPECT_EQ(ReplicaRecord::parse(planned.to_text()).value(), planned);
}

TEST(ReplicaRecord, IsCutToWhatTheKeeperTakes) {
    ReplicaRecord record = full();
    record.eager = std::string(5'000, 'e');
    for (const char* text : {"\"", "\x01", "ä", "x"}) {
        record.reason.clear();
        for (int i = 0; i < 5'000; ++i) record.reason += text;
        const std::string written = record.to_text();
        EXPECT_LE(written.size(), keeper_link::ledger_bytes_max);
        const auto read = ReplicaRecord::parse(written);
        ASSERT_TRUE(read) << written;
        EXPECT_EQ(read->crashes, record.crashes);
        EXPECT_GT(read->reason.size(), 20U);
    }
}

TEST(ReplicaRecord, KeepsTheNameOfAProcessThatWasABlank) {
    ReplicaRecord record = full();
    record.name = WorkerName{std::string(63, 'm'), 255, UINT64_MAX};
    record.reason = std::string(5'000, 'r');
    const std::string written = record.to_text();
    EXPECT_LE(written.size(), keeper_link::ledger_bytes_max);
    EXPECT_EQ(ReplicaRecord::parse(written).value().name, record.name);
    for (const char* name : {"[]", "7", R"(["a", -1, 2])", R"(["a", 0, "2"])", "[1, 0, 2]"})
        EXPECT_FALSE(ReplicaRecord::parse(std::string{R"({"v": 1, "name": )"} + name + "}").value().name) << name;
}

TEST(ReplicaRecord, CutsTheCauseOfTheLastCrashBeforeTheReasonOfAQuarantine) {
    ReplicaRecord record = full();
    record.last_crash->cause = std::string(5'000, 'c');
    const auto read = ReplicaRecord::parse(record.to_text()).value();
    EXPECT_EQ(read.reason, record.reason);
    ASSERT_TRUE(read.last_crash);
    EXPECT_GT(read.last_crash->cause.size(), 30U);
    EXPECT_EQ(read.last_crash->report, record.last_crash->report);

    record.eager = std::string(160, 'e');
    record.reason = std::string(500, '\x01');  // six bytes each
    const std::string text = record.to_text();
    EXPECT_LE(text.size(), keeper_link::ledger_bytes_max);
    EXPECT_GT(ReplicaRecord::parse(text)->reason.size(), 20U);
}

TEST(ReplicaRecord, OfCrashesOnTooManyGpusTheLastAreKept) {
    ReplicaRecord record;
    for (int i = 0; i < 5; ++i)
        record.on_gpu.push_back({"GPU-01234567-89ab-cdef-0123-456789abcde" + std::to_string(i), 1'700'000'000'000 + i});
    const auto read = ReplicaRecord::parse(record.to_text()).value();
    ASSERT_FALSE(read.on_gpu.empty());
    EXPECT_LT(read.on_gpu.size(), 5U);
    EXPECT_EQ(read.on_gpu,
              std::vector(record.on_gpu.end() - static_cast<std::ptrdiff_t>(read.on_gpu.size()), record.on_gpu.end()));
}

TEST(ReplicaRecord, WhyItRunsEagerlyIsCutToo) {
    ReplicaRecord record = full();
    record.eager = std::string(160, '\x01');  // six bytes each
    const std::string text = record.to_text();
    EXPECT_LE(text.size(), keeper_link::ledger_bytes_max);
    const auto read = ReplicaRecord::parse(text).value();
    EXPECT_GE(read.eager.size(), 20U);
    EXPECT_EQ(read.reason, record.reason);
    EXPECT_EQ(read.crashes, record.crashes);
}

TEST(Fingerprint, OfAFileThatDoesNotAnswerIsTheTextsAlone) {
    config::ModelSpec spec;
    spec.name = "m";
    spec.file = "/proc/self/exe";
    const std::string whole = fingerprint(spec);
    const std::string text = fingerprint_of_text(spec);
    EXPECT_NE(whole, text);
    EXPECT_TRUE(is_same_declaration(whole, text));
    EXPECT_TRUE(is_same_declaration(text, whole));
    EXPECT_TRUE(is_same_declaration(whole, whole));

    config::ModelSpec other = spec;
    other.file = "/proc/self/maps";
    EXPECT_FALSE(is_same_declaration(fingerprint(other), text));
    EXPECT_FALSE(is_same_declaration(fingerprint(other), whole));
    EXPECT_FALSE(is_same_declaration("", text)) << "nothing is known of what it was";
}

TEST(ReplicaRecord, RefusesWhatItDoesNotUnderstand) {
    for (const char* text : {"", "{", "[]", "7", "{}", R"({"v":2})", R"({"v":"1"})", "\xff\xfe"})
        EXPECT_FALSE(ReplicaRecord::parse(text)) << text;
    // Members of another type are as good as absent; nothing in it can hurt.
    const auto odd = ReplicaRecord::parse(
        R"({"v":1,"crashes":[-1,"x",5],"escalation":77,"keep":1,"ready_ms":-5,"device":{},)"
        R"("on_gpu":[7,"a",1e99,9223372036854775807,null,5,"b",1],"withdrawn_ms":-1,"by_count":"x"})");
    ASSERT_TRUE(odd);
    EXPECT_EQ(odd->escalation, Escalation::sigkill);
    EXPECT_EQ(odd->crashes.ready_before, std::vector{Millis{5}});
    EXPECT_FALSE(odd->keep_running || odd->gave_up_by_count);
    EXPECT_EQ(odd->ready_before_withdrawn, 0ms);
    EXPECT_EQ(odd->on_gpu, (std::vector<CrashOnGpu>{{"a", 5}, {"b", 6}}));
}

/// The record crosses releases: its keys are a format.
TEST(ReplicaRecord, ReadsAndWritesTheKeysOfEveryRelease) {
    using Settled = ReplicaRecord::Settled;
    const auto same = [](const std::string& text, EndAsked asked, Settled settled, std::int64_t due) {
        const auto record = ReplicaRecord::parse(text).value();
        EXPECT_EQ(record.end_asked, asked) << text;
        EXPECT_EQ(record.settled, settled) << text;
        EXPECT_EQ(record.restart_due_unix_ms, due) << text;
        EXPECT_EQ(record.to_text(), text);
    };
    same(R"({"v":1})", EndAsked::no, Settled::no, 0);
    same(R"({"v":1,"unload":true})", EndAsked::unload, Settled::no, 0);
    same(R"({"v":1,"replacing":true,"over":true})", EndAsked::replacement, Settled::stopped, 0);
    same(R"({"v":1,"quarantined":true})", EndAsked::no, Settled::quarantined, 0);
    same(R"({"v":1,"due_ms":1700000000000})", EndAsked::no, Settled::backoff, 1'700'000'000'000);
}

/// Of bytes that no supervisor has written, too, the next one has a record that the keeper takes
/// and that reads back.
TEST(ReplicaRecord, IsBoundedAndMeansTheSameWhateverItWasReadFrom) {
    const std::string far = std::to_string((std::int64_t{1} << 59) - 1);
    const std::string max = std::to_string(INT64_MAX);
    std::string crashes = "0";
    for (int i = 0; i < 500; ++i) crashes += ",0";
    for (const std::string& text :
         {R"({"v":1,"device":")" + std::string(1'100, 'd') + R"(","declaration":")" + std::string(1'100, 'c') +
              R"(","gpu":")" + std::string(1'100, 'g') + "\"}",
          R"({"v":1,"on_gpu":[")" + std::string(130, 'u') + R"(",5]})",
          R"({"v":1,"on_gpu":[")" + std::string(50, 'a') + "\"," + far + ",\"" + std::string(50, 'b') + "\"," + far +
              "]}",
          R"({"v":1,"crashes":[)" + crashes + "]}",
          R"({"v":1,"crash":{"lost":")" + std::string(96, 'x') + R"("},"gpu":")" + std::string(96, 'g') +
              R"(","eager":")" + std::string(160, 'e') + R"(","reason":")" + std::string(400, 'r') + "\"}"}) {
        const auto record = ReplicaRecord::parse(text);
        ASSERT_TRUE(record) << text;
        const std::string written = record->to_text();
        EXPECT_LE(written.size(), keeper_link::ledger_bytes_max);
        const auto read = ReplicaRecord::parse(written);
        ASSERT_TRUE(read) << written;
        EXPECT_EQ(read->to_text(), written);
    }
    const auto record =
        ReplicaRecord::parse(R"({"v":1,"withdrawn_ms":)" + max + R"(,"crashes":[)" + max + "," + max + "]}").value();
    RestartPolicy policy{true};
    record.restore(policy, RestartPolicy::Time{1h}, 0);
    EXPECT_EQ(policy.ended({Ending::crashed, 1s, true, {}}, RestartPolicy::Time{1h}, 0).unforgiven, 1U)
        << "all that was before is forgiven, and nothing overflows";
}

TEST(Fingerprint, ChangesWithWhatTheWorkerIsToldAndWithItsFile) {
    const bulkhead::test::TemporaryFolder folder;
    config::ModelSpec spec;
    spec.name = "m";
    spec.file = folder.path() / "model.pt";
    const std::string missing = fingerprint(spec);
    write(spec.file, "one");
    const std::string first = fingerprint(spec);
    EXPECT_NE(first, missing);
    EXPECT_EQ(fingerprint(spec), first);

    auto told = spec;
    told.environment["A"] = "1";
    EXPECT_NE(fingerprint(told), first);
    told = spec;
    told.deadlines.request = 1s;
    EXPECT_NE(fingerprint(told), first);
    auto untold = spec;
    untold.preload = true;
    untold.replicas = 4;
    untold.watchdog = 5s;
    untold.keep_alive = untold.min_resident = 60s;
    untold.priority = 7;
    untold.pin = true;
    untold.declared_bytes = 1 << 20;
    untold.other_devices = {"cuda:1"};
    untold.group = config::ModelGroup{"talk", config::GroupKind::together};
    untold.restart = config::RestartPolicy::never;
    untold.deadlines.capture = untold.deadlines.drain = untold.deadlines.kill = 1s;
    EXPECT_EQ(fingerprint(untold), first);

    write(folder.path() / "other.pt", "one");
    std::filesystem::rename(folder.path() / "other.pt", spec.file);
    EXPECT_NE(fingerprint(spec), first) << "same size, another file";
}

TEST(Fingerprint, OfAGeneratingModelChangesWithEachFileOfItsPackage) {
    const bulkhead::test::TemporaryFolder folder;
    config::ModelSpec spec;
    spec.name = "m";
    spec.runtime = config::Runtime::generate;
    spec.file = folder.path();
    write(folder.path() / "weights.safetensors", "one");
    const std::string missing = fingerprint(spec);
    EXPECT_THAT(missing, testing::EndsWith(":missing")) << "no manifest";
    write(folder.path() / "manifest.json", "{}");
    const std::string first = fingerprint(spec);
    EXPECT_NE(first, missing);
    EXPECT_EQ(fingerprint(spec), first);
    write(folder.path() / "weights.safetensors", "three");
    const std::string second = fingerprint(spec);
    EXPECT_NE(second, first);
    write(folder.path() / "decode.pt2", "x");
    EXPECT_NE(fingerprint(spec), second);
}

}  // namespace
}  // namespace bulkhead::supervisor
