// The demo's two models give what their own Python gives.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

const std::string python = BULKHEAD_BINARY_DIR "/venv/bin/python";
const std::string timeline = BULKHEAD_SOURCE_DIR "/clients/python/examples/vad_timeline.py";
const std::string reference = BULKHEAD_SOURCE_DIR "/scripts/models/reference.py";

TEST(RealModels, SileroVadEqualsItsPackageOnRecordedSpeech) {
    TemporaryFolder folder;
    Daemon daemon{fleet({silero_vad()})};
    const std::string probabilities = folder.path() / "probabilities.txt";
    const std::string audio = folder.path() / "speech.f32";

    const auto streamed =
        run({python, timeline, "--socket", daemon.socket(), "--save", probabilities, "--dump-audio", audio,
             "/usr/share/sounds/alsa/Front_Center.wav", "/usr/share/sounds/alsa/Rear_Left.wav"},
            {{"PYTHONPATH", BULKHEAD_SOURCE_DIR "/clients/python"}});
    ASSERT_EQ(streamed.exit_code, 0) << streamed.out << streamed.err;
    const auto compared = run({python, reference, "vad", "--audio", audio, "--compare", probabilities});

    EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
}

TEST(RealModels, MiniLmEqualsTheReferenceImplementationThroughTheCli) {
    TemporaryFolder folder;
    Daemon daemon{fleet({minilm()})};
    const std::string out = folder.path();
    const std::vector<std::string> sentences{"A man is playing the guitar.", "Word.",
                                             "The stock market fell sharply today, and nobody could say quite why."};
    std::vector<std::string> make{python, reference, "minilm", "--out", out};
    make.insert(make.end(), sentences.begin(), sentences.end());
    ASSERT_EQ(run(make).exit_code, 0);

    for (std::size_t i = 0; i < sentences.size(); ++i) {
        const std::string stem = out + "/s" + std::to_string(i);
        const auto inferred = daemon.cli({"infer", "minilm", "--input", "input_ids=@" + stem + "_input_ids.npy",
                                          "--input", "attention_mask=@" + stem + "_attention_mask.npy", "--output",
                                          "embedding=" + stem + "_bulkhead.npy"});
        ASSERT_EQ(inferred.exit_code, 0) << inferred.err;
    }
    std::vector<std::string> compare{python, reference, "similarity", "--out", out, "--ours", "bulkhead"};
    compare.insert(compare.end(), sentences.begin(), sentences.end());
    const auto compared = run(compare);

    EXPECT_EQ(compared.exit_code, 0) << compared.out << compared.err;
}

}  // namespace
}  // namespace bulkhead::test
