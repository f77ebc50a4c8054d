#include <cmath>
#include <numbers>

#include <gtest/gtest.h>

#include "clients/cpp/examples/resample.h"
#include "clients/cpp/examples/speech_segments.h"
#include "clients/cpp/examples/wav.h"

namespace bulkhead::example {
namespace {

class Wav {
public:
    Wav& text(std::string_view bytes) { return file_.insert(file_.end(), bytes.begin(), bytes.end()), *this; }
    template <typename T>
    Wav& number(T value) {
        const auto* bytes = reinterpret_cast<const char*>(&value);
        return file_.insert(file_.end(), bytes, bytes + sizeof value), *this;
    }
    Wav& start() { return text("RIFF").number(0u).text("WAVE"); }
    Wav& format(std::uint16_t encoding, std::uint16_t channels, std::uint32_t rate, std::uint16_t bits) {
        return text("fmt ")
            .number(16u)
            .number(encoding)
            .number(channels)
            .number(rate)
            .number(0u)
            .number(std::uint16_t{0})
            .number(bits);
    }
    Wav& data(std::vector<std::int16_t> samples) {
        text("data").number(static_cast<std::uint32_t>(samples.size() * 2));
        for (const std::int16_t sample : samples) number(sample);
        return *this;
    }
    [[nodiscard]] std::vector<char> bytes() const { return file_; }

private:
    std::vector<char> file_;
};

std::string refusal(const std::vector<char>& file) {
    const Result<Sound> sound = parse_wav(file);
    EXPECT_FALSE(sound);
    return sound ? "" : sound.error().attempt;
}

TEST(WavFile, MonoIsReadAndStereoIsAveraged) {
    const Sound mono = parse_wav(Wav{}.start().format(1, 1, 48000, 16).data({0, 16384, -32768}).bytes()).value();
    EXPECT_EQ(mono.rate_hz, 48000u);
    EXPECT_EQ(mono.samples, (std::vector<float>{0, 0.5f, -1}));

    const Sound stereo =
        parse_wav(Wav{}.start().format(1, 2, 8000, 16).data({16384, 0, -16384, -16384}).bytes()).value();
    EXPECT_EQ(stereo.samples, (std::vector<float>{0.25f, -0.5f}));
}

TEST(WavFile, UnknownChunksAreSkipped) {
    const auto file = Wav{}
                          .start()
                          .text("LIST")
                          .number(3u)
                          .text(std::string_view{"abc\0", 4})
                          .format(1, 1, 16000, 16)
                          .data({1})
                          .bytes();
    EXPECT_EQ(parse_wav(file).value().samples.size(), 1u);
}

TEST(WavFile, OtherFilesAndEncodingsAreNamed) {
    EXPECT_EQ(refusal({}), "no RIFF/WAVE file");
    EXPECT_EQ(refusal(Wav{}.text("OggS").number(0u).text("WAVE").bytes()), "no RIFF/WAVE file");
    EXPECT_EQ(refusal(Wav{}.start().format(3, 1, 16000, 32).data({}).bytes()),
              "encoding 3 with 32 bits; 16-bit PCM is read");
    EXPECT_EQ(refusal(Wav{}.start().format(1, 6, 16000, 16).data({}).bytes()), "6 channels; one or two are read");
    EXPECT_EQ(refusal(Wav{}.start().format(1, 1, 0, 16).data({}).bytes()), "a rate of 0 Hz");
    EXPECT_EQ(refusal(Wav{}.start().data({1}).bytes()), "samples before their format");
}

TEST(WavFile, AFileCutAnywhereIsTruncatedAndNeverReadBeyond) {
    const std::vector<char> whole = Wav{}.start().format(1, 1, 16000, 16).data({1, 2, 3}).bytes();
    for (std::size_t length = 0; length < whole.size(); ++length)
        EXPECT_FALSE(parse_wav({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length)})) << length;
    EXPECT_NE(
        refusal({whole.begin(), whole.end() - 2}).find("truncated: chunk \"data\" should have 6 bytes, 4 are left"),
        std::string::npos);
}

std::vector<float> sine(double hz, std::uint32_t rate_hz, std::size_t count) {
    std::vector<float> samples(count);
    for (std::size_t i = 0; i < count; ++i)
        samples[i] = static_cast<float>(std::sin(2 * std::numbers::pi * hz * static_cast<double>(i) / rate_hz));
    return samples;
}

class Resample : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(Resample, KeepsATonesFrequencyPhaseAndLevel) {
    const std::vector<float> output = resample(sine(1000, GetParam(), GetParam()), GetParam(), 16000);
    const std::vector<float> expected = sine(1000, 16000, 16000);

    ASSERT_EQ(output.size(), expected.size());
    for (std::size_t i = 200; i < output.size() - 200; ++i) ASSERT_NEAR(output[i], expected[i], 2e-3) << i;
}

TEST_P(Resample, KeepsAConstantConstant) {
    const std::vector<float> output = resample(std::vector<float>(GetParam(), 0.5f), GetParam(), 16000);

    for (std::size_t i = 200; i < output.size() - 200; ++i) ASSERT_NEAR(output[i], 0.5, 1e-5) << i;
}

INSTANTIATE_TEST_SUITE_P(FromUsualRates, Resample, ::testing::Values(8000, 11025, 22050, 44100, 48000, 96000));

TEST(Resample, SilencesWhatTheLowerRateCannotCarry) {
    const std::vector<float> output = resample(sine(10'000, 48000, 48000), 48000, 16000);

    for (std::size_t i = 200; i < output.size() - 200; ++i) ASSERT_NEAR(output[i], 0, 1e-3) << i;
}

TEST(Resample, EqualRatesChangeNothing) {
    const std::vector<float> input{0.1f, -0.2f};
    EXPECT_EQ(resample(input, 16000, 16000), input);
    EXPECT_TRUE(resample({}, 48000, 16000).empty());
}

std::vector<float> probabilities(std::initializer_list<std::pair<int, float>> runs) {
    std::vector<float> all;
    for (const auto& [count, value] : runs) all.insert(all.end(), static_cast<std::size_t>(count), value);
    return all;
}

TEST(SpeechSegments, SpeechIsPaddedOnBothSides) {
    EXPECT_EQ(speech_segments(probabilities({{10, 0.1f}, {20, 0.9f}, {10, 0.1f}}), 0.5),
              (std::vector<Segment>{{10 * 512 - 480, 30 * 512 + 480}}));
}

TEST(SpeechSegments, ABlipIsNoSpeechAndADipIsNoPause) {
    EXPECT_TRUE(speech_segments(probabilities({{10, 0}, {7, 0.9f}, {10, 0}}), 0.5).empty());
    EXPECT_EQ(speech_segments(probabilities({{10, 0.9f}, {3, 0}, {10, 0.9f}, {10, 0}}), 0.5).size(), 1u);
    EXPECT_EQ(speech_segments(probabilities({{10, 0.9f}, {30, 0.4f}, {10, 0.9f}, {10, 0}}), 0.5).size(), 1u)
        << "between the two thresholds nothing changes";
}

TEST(SpeechSegments, NeighboursShareAShortSilence) {
    const auto segments = speech_segments(probabilities({{10, 0.9f}, {5, 0}, {10, 0.9f}, {10, 0}}), 0.5);

    ASSERT_EQ(segments.size(), 2u);
    EXPECT_EQ(segments[0].end, 10 * 512 + 480);
    EXPECT_EQ(segments[1].start, 15 * 512 - 480);
}

TEST(SpeechSegments, SpeechUntilTheEndEndsThere) {
    EXPECT_EQ(speech_segments(probabilities({{20, 0.9f}}), 0.5), (std::vector<Segment>{{0, 20 * 512}}));
    EXPECT_TRUE(speech_segments({}, 0.5).empty());
}

}  // namespace
}  // namespace bulkhead::example
