// What a load and an unload cost, beside the same model in a bare LibTorch program.

#include "tests/bench/peers/peer.h"
#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench {
namespace {

/// Until a process waits for a model, and has said hello.
void await_blank(const test::Daemon& daemon) {
    const auto deadline = Clock::now() + std::chrono::seconds{60};
    while (daemon.call("daemon.info").value().at("blanks").at("ready") != boost::json::value(1) &&
           Clock::now() < deadline) {
    }
}

Records load() {
    Records records;
    struct Case {
        const char* name;
        std::string yaml;
        std::string runtime;
        std::string file;
    };
    const std::vector<Case> cases{
        {"silero-vad", test::silero_vad(), "torchscript", test::model_file("silero_vad.jit")},
        {"minilm", test::minilm(), "aoti", test::model_file("minilm.pt2")},
    };
    for (const Case& each : cases) {
        test::Daemon daemon{test::fleet({each.yaml})};
        std::vector<double> unloads;
        const auto load_once = [&] {
            const double us = microseconds([&] { (void)daemon.load(each.name).value(); });
            unloads.push_back(microseconds([&] { (void)daemon.unload(each.name).value(); }));
            return us / 1000;
        };
        const auto program = [&each](const char* mode) {
            return std::vector<std::string>{test::program("bare_libtorch"), mode, each.runtime, each.file};
        };
        std::vector<double> kills;
        const auto bare = [&] {
            Peer loaded{program("hold")};
            if (loaded.await_ready().empty()) kills.push_back(microseconds([&] { loaded.kill(); }) / 1000);
            return microseconds([&] { (void)test::run(program("load")); }) / 1000;
        };
        load_once();  // fills the package cache and the page cache
        (void)bare();
        unloads.clear();
        kills.clear();
        const Pair pair = interleaved(7, load_once, bare);
        records.push_back({std::string{each.name} + ": load to ready", pair.value, "ms",
                           "bare LibTorch process: start, load, one inference", pair.baseline});
        test::Daemon ahead{test::fleet({each.yaml}) + "blanks: 1\n"};
        const auto load_by_blank = [&] {
            await_blank(ahead);
            const double us = microseconds([&] { (void)ahead.load(each.name).value(); });
            (void)ahead.unload(each.name).value();
            return us / 1000;
        };
        const Pair by_blank = interleaved(7, load_by_blank, bare);
        records.push_back({std::string{each.name} + ": load to ready by a blank", by_blank.value, "ms",
                           "bare LibTorch process: start, load, one inference", by_blank.baseline});
        records.push_back({std::string{each.name} + ": unload, receipt included", median(unloads) / 1000, "ms",
                           "SIGKILL and waitpid of a bare LibTorch process with the same model", median(kills)});
    }
    return records;
}

const Bench load_bench{"load", "load to ready, and unload to receipt", load};

}  // namespace
}  // namespace bulkhead::bench
