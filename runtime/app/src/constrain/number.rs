//! JSON numbers within bounds, digit by digit: a digit is allowed only if some number within the bounds begins that way.
//!
//! Bounded numbers are written without an exponent and with at most 15 digits, so that text, double and bounds compare alike
//! in every reader. An integer is written without a fraction.

use std::io::Write;

/// Digits before the point of an integer, of a bounded number, and of any other number.
const INTEGER_DIGITS: u32 = 18;
const DIGITS: u32 = 15;
/// Digits before the point for which there is room where only one bound is given.
const OPEN_DIGITS: u32 = 9;
/// Most digits of a fraction.
const FRACTION_DIGITS: u32 = 12;
const EXPONENT_DIGITS: u8 = 2;

/// Which numbers are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NumberSpec {
    /// Bounds in units of 10^-`fraction`, inclusive.
    lo: i128,
    hi: i128,
    /// Most digits before the point.
    digits: u32,
    /// Most digits after it.
    fraction: u32,
    /// Whether `lo` and `hi` are to be kept to; else an exponent is allowed.
    bounded: bool,
}

/// A bound as a decimal: `mantissa * 10^exponent`.
#[derive(Debug, Clone, Copy)]
struct Decimal {
    mantissa: i128,
    exponent: i32,
}

impl Decimal {
    /// From text such as `-1`, `0.25` or `1e-7`.
    fn parse(text: &str) -> Option<Self> {
        let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let mantissa = format!("{whole}{fraction}").parse().ok()?;
        let exponent = exponent.parse::<i32>().ok()?.checked_sub(fraction.len() as i32)?;
        Some(Self { mantissa, exponent })
    }

    /// In units of 10^-`fraction`, rounded down or up; saturates far outside of what a number can be.
    fn scaled(self, fraction: u32, up: bool) -> i128 {
        const FAR: i128 = 10i128.pow(36);
        let shift = self.exponent + fraction as i32;
        if self.mantissa == 0 {
            return 0;
        }
        if shift >= 0 {
            let factor = if shift > 36 { None } else { 10i128.checked_pow(shift as u32) };
            let product = factor.and_then(|f| self.mantissa.checked_mul(f));
            return product.unwrap_or(FAR * self.mantissa.signum()).clamp(-FAR, FAR);
        }
        let divisor = 10i128.checked_pow(shift.unsigned_abs()).unwrap_or(i128::MAX);
        let down = self.mantissa.div_euclid(divisor);
        if up && self.mantissa.rem_euclid(divisor) != 0 { down + 1 } else { down }
    }

    /// Digits before the point.
    fn digits(self) -> u32 {
        self.scaled(0, self.mantissa > 0).unsigned_abs().checked_ilog10().map_or(1, |n| n + 1)
    }
}

/// A bound of a schema.
#[derive(Debug, Clone)]
pub(super) struct Bound {
    /// The number as JSON writes it.
    pub text: String,
    /// Whether the bound itself is not allowed.
    pub exclusive: bool,
}

/// Where a number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before the first digit.
    Start,
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    ESign,
    Exponent,
}

/// A number in the making.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Number {
    place: Place,
    negative: bool,
    /// Digits of the part at hand.
    count: u8,
    /// All digits before the exponent as one number, if bounds are kept to.
    value: u64,
}

impl NumberSpec {
    /// Numbers within bounds.
    ///
    /// # Errors
    /// If there is none, with the bounds in words.
    pub fn new(integer: bool, lo: Option<&Bound>, hi: Option<&Bound>) -> Result<Self, String> {
        let decimal = |b: &Bound| Decimal::parse(&b.text).ok_or_else(|| format!("the bound {}", b.text));
        let (low, high) = (lo.map(decimal).transpose()?, hi.map(decimal).transpose()?);
        let bounded = low.is_some() || high.is_some();
        let known = low.into_iter().chain(high).map(Decimal::digits).max().unwrap_or(DIGITS);
        let open = if low.is_some() && high.is_some() { known } else { known.max(OPEN_DIGITS) };
        let (digits, fraction) = match (integer, bounded) {
            (true, false) => (INTEGER_DIGITS, 0),
            (true, true) => (open.min(INTEGER_DIGITS), 0),
            (false, false) => (DIGITS, DIGITS),
            (false, true) => (open.min(DIGITS), (DIGITS - open.min(DIGITS)).min(FRACTION_DIGITS)),
        };
        let far = 10i128.pow(digits + fraction) - 1;
        let exclusive = |b: Option<&Bound>| b.is_some_and(|b| b.exclusive);
        // A bound between two units excludes itself.
        let least = low.map_or(-far, |d| {
            let (down, up) = (d.scaled(fraction, false), d.scaled(fraction, true));
            if exclusive(lo) && down == up { up + 1 } else { up }
        });
        let most = high.map_or(far, |d| {
            let (down, up) = (d.scaled(fraction, false), d.scaled(fraction, true));
            if exclusive(hi) && down == up { down - 1 } else { down }
        });
        let spec = Self { lo: least.max(-far), hi: most.min(far), digits, fraction, bounded: bounded || integer };
        if spec.lo > spec.hi {
            let text = |b: Option<&Bound>| b.map_or("any", |b| &b.text).to_owned();
            return Err(format!("no number from {} to {}", text(lo), text(hi)));
        }
        Ok(spec)
    }

    fn unit(&self) -> i128 {
        10i128.pow(self.fraction)
    }

    /// Least and largest magnitude with this sign; the first is above the second if there is none.
    fn magnitudes(&self, negative: bool) -> (i128, i128) {
        // No -0.
        if negative { ((-self.hi).max(1), -self.lo) } else { (self.lo.max(0), self.hi) }
    }

    /// The number whose first byte is `b`.
    pub fn start(&self, b: u8) -> Option<Number> {
        let n = Number { place: Place::Start, negative: b == b'-', count: 0, value: 0 };
        if b == b'-' {
            let (lo, hi) = self.magnitudes(true);
            (!self.bounded || lo <= hi).then_some(n)
        } else {
            self.step(n, b)
        }
    }

    /// `n` with `b` after it.
    pub fn step(&self, n: Number, b: u8) -> Option<Number> {
        use Place::{E, ESign, Exponent, Fraction, Point, Start, Whole, Zero};
        let digit = b.is_ascii_digit();
        let (place, count) = match (n.place, b) {
            (Start, b'0') => (Zero, 1),
            (Start, b'1'..=b'9') => (Whole, 1),
            (Whole, _) if digit && u32::from(n.count) < self.digits => (Whole, n.count + 1),
            (Zero | Whole, b'.') if self.fraction > 0 => (Point, 0),
            (Point | Fraction, _) if digit && u32::from(n.count) < self.fraction => (Fraction, n.count + 1),
            (Zero | Whole | Fraction, b'e' | b'E') if !self.bounded => (E, 0),
            (E, b'+' | b'-') => (ESign, 0),
            (E | ESign, _) if digit => (Exponent, 1),
            (Exponent, _) if digit && n.count < EXPONENT_DIGITS => (Exponent, n.count + 1),
            _ => return None,
        };
        let mut next = Number { place, count, ..n };
        if self.bounded && digit {
            // At most 18 digits.
            next.value = n.value * 10 + u64::from(b - b'0');
        }
        (!self.bounded || self.can_end(next)).then_some(next)
    }

    /// Least and largest magnitude of the numbers that begin with `n` and have `more` digits more before the point.
    fn span(&self, n: Number, more: u32) -> (i128, i128) {
        let value = i128::from(n.value);
        let factor = match n.place {
            Place::Point => self.unit(),
            Place::Fraction => 10i128.pow(self.fraction.saturating_sub(n.count.into())),
            _ => self.unit() * 10i128.pow(more),
        };
        (value * factor, (value + 1) * factor - 1)
    }

    /// How many digits may still come before the point.
    fn more(&self, n: Number) -> u32 {
        if n.place == Place::Whole { self.digits.saturating_sub(n.count.into()) } else { 0 }
    }

    /// Whether a number within the bounds begins with `n`.
    fn can_end(&self, n: Number) -> bool {
        let (lo, hi) = self.magnitudes(n.negative);
        (0..=self.more(n)).any(|more| {
            let (least, most) = self.span(n, more);
            least <= hi && lo <= most
        })
    }

    /// Whether `n` is a number as it is.
    pub fn is_whole(&self, n: Number) -> bool {
        match n.place {
            Place::Start | Place::Point | Place::E | Place::ESign => false,
            _ if !self.bounded => true,
            _ => {
                let (lo, hi) = self.magnitudes(n.negative);
                (lo..=hi).contains(&self.span(n, 0).0)
            }
        }
    }

    /// Adds to `out` the fewest bytes that end `n`.
    pub fn close(&self, n: Number, out: &mut Vec<u8>) {
        if self.is_whole(n) {
            return;
        }
        if !self.bounded {
            return out.push(b'0');
        }
        let (lo, hi) = self.magnitudes(n.negative);
        let start = n.place == Place::Start;
        // Fewest bytes first: digits before the point cost one each, a fraction one more than its digits.
        for bytes in 1..=self.digits + self.fraction + 1 {
            if start || n.place == Place::Whole {
                let (least, most) = if start {
                    // As many digits as bytes, none of them a leading zero.
                    let first = if bytes == 1 { 0 } else { 10i128.pow(bytes - 1) };
                    (first * self.unit(), 10i128.pow(bytes) * self.unit() - 1)
                } else {
                    self.span(n, bytes.min(self.more(n)))
                };
                let room = if start { self.digits } else { self.more(n) };
                if bytes <= room
                    && let Some(x) = multiple(least.max(lo), most.min(hi), self.unit())
                {
                    let known = if start { 0 } else { n.count };
                    return put(out, known, format_args!("{}", x / self.unit()));
                }
            }
            // What stands before the point if a fraction follows: given, or zero.
            let (base, given, lead) = match n.place {
                Place::Start => (Number { place: Place::Zero, count: 1, ..n }, 0, "0."),
                Place::Zero | Place::Whole => (n, 0, "."),
                _ => (n, u32::from(n.count), ""),
            };
            let Some(digits) = bytes.checked_sub(lead.len() as u32).filter(|&d| d > 0) else { continue };
            if given + digits > self.fraction {
                continue;
            }
            let (least, most) = self.span(base, 0);
            let unit = 10i128.pow(self.fraction - given - digits);
            if let Some(x) = multiple(least.max(lo), most.min(hi), unit) {
                return put(out, 0, format_args!("{lead}{:0width$}", (x - least) / unit, width = digits as usize));
            }
        }
        // Large and broken, as 1234567.5 between two whole numbers: all of it.
        let all = if start {
            multiple(lo, hi, 1)
        } else {
            (0..=self.more(n)).find_map(|more| {
                let (least, most) = self.span(n, more);
                multiple(least.max(lo), most.min(hi), 1)
            })
        };
        if let Some(x) = all {
            let (whole, rest, width) = (x / self.unit(), x % self.unit(), self.fraction as usize);
            put(out, if start { 0 } else { n.count }, format_args!("{whole}.{rest:0width$}"));
        }
    }

    /// Adds the shortest number to `out`.
    pub fn shortest(&self, out: &mut Vec<u8>) {
        let from = out.len();
        let (lo, hi) = self.magnitudes(false);
        let n = Number { place: Place::Start, negative: false, count: 0, value: 0 };
        if lo <= hi || !self.bounded {
            return self.close(n, out);
        }
        out.push(b'-');
        self.close(Number { negative: true, ..n }, out);
        debug_assert!(out.len() > from + 1);
    }

    /// Whether `text`, a JSON number, is one of these.
    #[cfg(test)]
    pub fn has(&self, text: &str) -> bool {
        let mut bytes = text.bytes();
        let first = bytes.next().and_then(|b| self.start(b));
        bytes.try_fold(first, |n, b| Some(n.and_then(|n| self.step(n, b)))).flatten().is_some_and(|n| self.is_whole(n))
    }
}

/// Adds `text` without its first `known` bytes.
fn put(out: &mut Vec<u8>, known: u8, text: std::fmt::Arguments<'_>) {
    let start = out.len();
    // Writing to memory does not fail.
    let _ = out.write_fmt(text);
    out.drain(start..out.len().min(start + usize::from(known)));
}

/// The least multiple of `unit` from `lo` to `hi`.
fn multiple(lo: i128, hi: i128, unit: i128) -> Option<i128> {
    let x = (lo + unit - 1).div_euclid(unit) * unit;
    (x <= hi).then_some(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(integer: bool, lo: Option<&str>, hi: Option<&str>, exclusive: bool) -> Result<NumberSpec, String> {
        let bound = |t: &str| Bound { text: t.into(), exclusive };
        NumberSpec::new(integer, lo.map(bound).as_ref(), hi.map(bound).as_ref())
    }

    #[test]
    fn digits_are_allowed_only_on_the_way_to_a_number_within_the_bounds() {
        for (integer, lo, hi, yes, no) in [
            (true, Some("0"), Some("2"), "0 1 2", "3 -1 10 00 0.0 -0"),
            (true, Some("-12"), Some("105"), "-12 -1 0 99 100 105", "-13 106 1000 -20"),
            (true, Some("95"), None, "95 100 1234567", "94 9 0"),
            (true, None, None, "0 -7 123456789012345678", "1234567890123456789 1.0 01"),
            (false, Some("0"), Some("1"), "0 1 0.5 0.999 1.0 1.000", "1.1 2 -0.1 -0 1.0001 1e0"),
            (false, Some("-0.5"), Some("0.25"), "-0.5 0.25 0.0 0 -0.25", "-0.51 0.251 1 -1"),
            (false, None, None, "-1.5e-7 0 2E+10 1e5", "1e100 .5 1. +1 --1"),
            (false, Some("1.5"), Some("1.5"), "1.5 1.50", "1 2 1.51 1.4"),
        ] {
            let s = spec(integer, lo, hi, false).unwrap();
            yes.split(' ').for_each(|t| assert!(s.has(t), "{t} {s:?}"));
            no.split(' ').for_each(|t| assert!(!s.has(t), "{t} {s:?}"));
        }
        let s = spec(false, Some("0"), Some("1"), true).unwrap();
        assert!(s.has("0.001") && s.has("0.999") && !s.has("0") && !s.has("1") && !s.has("0.0") && !s.has("1.0"));
        let s = spec(true, Some("0"), Some("2"), true).unwrap();
        assert!(s.has("1") && !s.has("0") && !s.has("2"));
        assert!(spec(true, Some("0.2"), Some("0.8"), false).is_err());
        assert!(spec(false, Some("2"), Some("1"), false).is_err());
    }

    /// From every prefix of every number that a random walk reaches, closing gives a number of the same bounds.
    #[test]
    fn every_beginning_can_be_closed() {
        let bounds =
            ["-1e30", "-123456.75", "-10", "-0.001", "0", "1e-9", "0.125", "1", "7.5", "99", "1000000", "1e20"];
        let mut seed = 7u64;
        let mut random = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % n
        };
        let mut walks = 0;
        for _ in 0..20_000 {
            let mut pick = || Some(bounds[random(bounds.len())]).filter(|_| random(4) > 0);
            let (lo, hi) = (pick(), pick());
            let (integer, exclusive) = (random(2) == 0, random(3) == 0);
            let Ok(s) = spec(integer, lo, hi, exclusive) else { continue };
            let mut text = Vec::new();
            s.shortest(&mut text);
            assert!(s.has(str::from_utf8(&text).unwrap()), "{:?} {s:?}", str::from_utf8(&text));
            text.clear();
            let mut n = None;
            for _ in 0..random(12) {
                let b = b"-0123456789.e"[random(13)];
                if let Some(next) = n.map_or_else(|| s.start(b), |n| s.step(n, b)) {
                    n = Some(next);
                    text.push(b);
                }
            }
            if let Some(n) = n {
                s.close(n, &mut text);
                let text = str::from_utf8(&text).unwrap();
                assert!(s.has(text), "{text} {s:?}");
                let x: f64 = text.parse().unwrap();
                let (l, h) = (lo.map(|t| t.parse().unwrap()), hi.map(|t| t.parse().unwrap()));
                assert!(l.is_none_or(|l: f64| if exclusive { x > l } else { x >= l }), "{text} {lo:?}");
                assert!(h.is_none_or(|h: f64| if exclusive { x < h } else { x <= h }), "{text} {hi:?}");
                walks += 1;
            }
        }
        assert!(walks > 5_000, "{walks}");
    }
}
