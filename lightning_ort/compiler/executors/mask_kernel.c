/* Dropout masks as torch's CPU generator draws them, for mask_kernel.py.

   The generator is mt19937: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998). An element takes two of
   its 32-bit numbers, of which at::uniform_real_distribution<double> uses 53 bits. The loops are written so that a
   compiler can use vector instructions. */

#include <stdint.h>

enum { N = 624, M = 397 };

/* the start of what torch.Generator.get_state() returns: CPUGeneratorImplStateLegacy */
typedef struct {
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next;
  uint64_t words[N];
} State;

static inline uint32_t mixed(uint32_t one, uint32_t following, uint32_t distant) {
  uint32_t y = (one & 0x80000000u) | (following & 0x7fffffffu);
  return distant ^ (y >> 1) ^ (-(following & 1u) & 0x9908b0dfu);
}

static void next_words(uint32_t *words) {
  int i;
  /* no word is read less than 227 words after it was written: more than any vector holds */
#pragma GCC ivdep
  for (i = 0; i < N - M; i++) words[i] = mixed(words[i], words[i + 1], words[i + M]);
#pragma GCC ivdep
  for (; i < N - 1; i++) words[i] = mixed(words[i], words[i + 1], words[i + M - N]);
  words[N - 1] = mixed(words[N - 1], words[0], words[M - 1]);
}

static void temper(const uint32_t *restrict words, uint32_t *restrict numbers) {
  for (int i = 0; i < N; i++) {
    uint32_t y = words[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    numbers[i] = y ^ (y >> 18);
  }
}

#define FILL(TYPE) \
  static void fill_##TYPE(const uint32_t *restrict numbers, TYPE *restrict out, int64_t count, uint64_t below, \
                          TYPE one) { \
    for (int64_t i = 0; i < count; i++) { \
      uint64_t drawn = ((uint64_t)(numbers[2 * i] & 0x1fffffu) << 32) | numbers[2 * i + 1]; \
      out[i] = drawn < below ? one : 0; \
    } \
  }
FILL(uint8_t)
FILL(uint16_t)
FILL(uint32_t)
FILL(uint64_t)

static void fill(const uint32_t *numbers, void *out, int64_t count, int size, uint64_t below, uint64_t one) {
  if (size == 1) fill_uint8_t(numbers, out, count, below, one);
  else if (size == 2) fill_uint16_t(numbers, out, count, below, one);
  else if (size == 4) fill_uint32_t(numbers, out, count, below, one);
  else fill_uint64_t(numbers, out, count, below, one);
}

/* Write `one` to an element if its 53-bit number is below `below`, else 0, and move the generator on.

   size: bytes of an element, 1, 2, 4 or 8. */
void draw_mask(State *state, char *out, int64_t count, int size, uint64_t below, uint64_t one) {
  uint32_t words[N], numbers[N], pair[2];
  int at = state->left == 1 ? N : (int)state->next;
  if (count <= 0) return;
  for (int i = 0; i < N; i++) words[i] = (uint32_t)state->words[i];
  temper(words, numbers);
  while (count > 0) {
    if (at == N) {
      next_words(words);
      temper(words, numbers);
      at = 0;
    }
    int64_t several = (N - at) / 2;
    if (several > count) several = count;
    fill(numbers + at, out, several, size, below, one);
    at += 2 * several;
    out += several * size;
    count -= several;
    if (count > 0 && at == N - 1) { /* an odd number of 32-bit numbers was drawn before */
      pair[0] = numbers[at];
      next_words(words);
      temper(words, numbers);
      pair[1] = numbers[0];
      at = 1;
      fill(pair, out, 1, size, below, one);
      out += size;
      count--;
    }
  }
  for (int i = 0; i < N; i++) state->words[i] = words[i];
  state->next = at;
  state->left = N + 1 - at;
}
