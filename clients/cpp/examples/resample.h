#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <numeric>
#include <span>
#include <vector>

namespace bulkhead::example {

/// Polyphase resampling with a Kaiser-windowed sinc: 32 zero crossings, stop band below -80 dB,
/// cut-off at 0.94 of the lower Nyquist frequency. Assumes silence before and after. Each phase
/// sums to one, so that a constant stays constant.
inline std::vector<float> resample(std::span<const float> input, std::uint32_t from_hz, std::uint32_t to_hz) {
    if (from_hz == to_hz) return {input.begin(), input.end()};
    constexpr double crossings = 16, beta = 8.0, roll_off = 0.94;
    const std::uint32_t divisor = std::gcd(from_hz, to_hz);
    const std::size_t up = to_hz / divisor, down = from_hz / divisor;
    const double cutoff = roll_off * std::min(1.0, static_cast<double>(to_hz) / from_hz);
    const auto half = static_cast<std::ptrdiff_t>(std::ceil(crossings / cutoff));
    const std::size_t taps = 2 * static_cast<std::size_t>(half);

    // One filter per phase: the output lies `phase / up` of an input sample behind input index 0.
    std::vector<float> filters(up * taps);
    for (std::size_t phase = 0; phase < up; ++phase) {
        std::vector<double> weights(taps);
        for (std::size_t k = 0; k < taps; ++k) {
            const double t = static_cast<double>(static_cast<std::ptrdiff_t>(k) - half + 1) -
                             static_cast<double>(phase) / static_cast<double>(up);
            const double x = std::numbers::pi * cutoff * t;
            const double edge = t / static_cast<double>(half);
            const double window = std::abs(edge) < 1 ? std::cyl_bessel_i(0.0, beta * std::sqrt(1 - edge * edge)) : 0.0;
            weights[k] = (std::abs(x) < 1e-12 ? 1.0 : std::sin(x) / x) * window;
        }
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (std::size_t k = 0; k < taps; ++k) filters[phase * taps + k] = static_cast<float>(weights[k] / sum);
    }

    std::vector<float> output((input.size() * up + down - 1) / down);
    const auto length = static_cast<std::ptrdiff_t>(input.size());
    for (std::size_t n = 0; n < output.size(); ++n) {
        const std::size_t position = n * down;
        const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(position / up) - half + 1;
        const float* filter = filters.data() + position % up * taps;
        double sum = 0;
        for (std::ptrdiff_t k = std::max<std::ptrdiff_t>(0, -first);
             k < static_cast<std::ptrdiff_t>(taps) && first + k < length; ++k)
            sum += double{filter[k]} * double{input[static_cast<std::size_t>(first + k)]};
        output[n] = static_cast<float>(sum);
    }
    return output;
}

}  // namespace bulkhead::example
