//! Token ids against the `tokenizers` crate, on text in many languages and on noise: they must be equal, and decode to the
//! text again. The bundled models' vocabularies and one of the published size; each from both forms of file.

use forerun::tokenizer::{Stream, Tokenizer};
use forerun_tests::path;
use forerun_tests::vocabulary::{Random, Texts, tokenizer};
use tokenizers::Tokenizer as Oracle;

/// Text that each vocabulary is tried with, bytes.
const CORPUS_BYTES: usize = 1 << 20;

/// Words and sentences, all normalized: decoding gives them again.
const NORMAL: [&str; 83] = [
    "The quick brown fox jumps over the lazy dog.",
    "it's we'll they've I'm you'd don't THEY'RE He'S o'clock 'tis rock'n'roll 'quoted'",
    "it\u{2019}s d\u{2019}accord '\u{17f}chon I'\u{17f}",
    "Größe, Straße, ÄÖÜ äöü ß ẞ",
    "Où est le garçon ? « Là-bas », dit-elle…",
    "¿Dónde está el baño? ¡Aquí!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Zażółć gęślą jaźń",
    "Þess vegna ætla ég að læra íslensku",
    "İstanbul'da ığdır şöför",
    "Tiếng Việt có nhiều dấu: ngữ, đường, phở",
    "Η γρήγορη καφετιά αλεπού πηδάει πάνω από το σκυλί",
    "ἐν ἀρχῇ ἦν ὁ λόγος",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ґанок, їжак, єнот і щука",
    "Ђорђе је јуче ћутао",
    "Բարեւ աշխարհ",
    "გამარჯობა მსოფლიო ႠႡႢ",
    "שָׁלוֹם עוֹלָם",
    "מה שלומך היום?",
    "مرحبا بالعالم، كيف حالك؟",
    "سلام دنیا، می\u{200c}خواهم",
    "ٱلسَّلَامُ عَلَيْكُمْ",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "ওহে বিশ্ব কেমন আছো",
    "ਸਤ ਸ੍ਰੀ ਅਕਾਲ",
    "வணக்கம் உலகம்",
    "హలో ప్రపంచం",
    "ಹಲೋ ವರ್ಲ್ಡ್",
    "ഹലോ വേൾഡ്",
    "ආයුබෝවන් ලෝකය",
    "สวัสดีชาวโลก วันนี้เป็นอย่างไรบ้าง",
    "ສະບາຍດີຊາວໂລກ",
    "မင်္ဂလာပါကမ္ဘာလောက",
    "សួស្តីពិភពលោក",
    "བཀྲ་ཤིས་བདེ་ལེགས།",
    "ሰላም ለዓለም",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ",
    "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ",
    "你好,世界!今天的天气怎么样?",
    "漢字と平仮名とカタカナ、ガギグゲゴ。パピプペポ",
    "東京タワーの高さは333メートルです。",
    "안녕하세요 세계, 오늘 날씨가 어때요?",
    "𠮷野家で𩸽を食べる",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒎𝒂𝒕𝒉 ℝⁿ → ∑ᵢ xᵢ² ≤ ∞",
    "𐌰𐌱𐌲 𓀀𓁐 𒀀𒁇",
    "👋🌍 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 1️⃣ ❤️‍🔥 🧑🏿‍🚀",
    "0 1 23 4567 89012345 3.14159 -1e-9 0xDEADBEEF 1_000_000 12:34:56",
    "٠١٢٣ ०१२३ ๐๑๒๓ 012 ²³¹ ½⅓¾ ⅫⅣ ①②③ ㊿ 𝟘𝟙𝟚",
    "fn main() { let x: Vec<u8> = vec![1, 2, 3]; println!(\"{x:?}\"); }",
    "if (a && !b) { return c ? d[0] : *e->f; } // comment",
    "def f(*args, **kw):\n    return {k: v for k, v in kw.items()}\n\n\n\tpass\n",
    "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"n\": [1, null, true]}}",
    "SELECT * FROM t WHERE id >= 10 AND name LIKE '%x_%';",
    "<div class=\"a b\">&nbsp;&lt;text&gt;</div><!-- c -->",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\Users\\x\\y.txt",
    "| a | b |\n|---|---|\n| 1 | **2** |\n\n* item\n  - sub-item\n",
    "!!! ??? ... --- === ,,, ;;; ::: (((())))",
    "#include <stdio.h>\r\n\r\nint main(void)\r\n{\r\n\treturn 0;\r\n}\r\n",
    " leading and trailing ",
    "  two   three    four     spaces",
    "\ttab\t\ttabs \t mixed\t ",
    "\n",
    "\n\n",
    "\r\n\r\n",
    "\r",
    "a\rb\nc\r\nd\n\re",
    " \n  \n   \n x",
    "\u{a0}no\u{a0}break\u{a0}\u{a0}space\u{202f}thin\u{2009}",
    "\u{3000}全角\u{3000}\u{3000}空白",
    "line\u{2028}separator\u{2029}paragraph\u{85}next\u{b}vertical\u{c}feed",
    "zero\u{200b}width\u{200d}joiner\u{feff}bom\u{ad}soft",
    "\u{0}nul \u{1}\u{1f}\u{7f} control",
    "\u{e000}private\u{f8ff} \u{fffd}\u{ffff} \u{10ffff}",
    "<|im_st <|im_start| <think <|im_end|<|> < |im_end|> <|IM_END|> im_start|>",
    "<<think>> <|im_start|><|im_start|> <image></image>",
    "user\n",
    "assistant\n",
    " ",
    "x",
    "'",
    "é",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// Text that normalizing changes.
const DECOMPOSED: [&str; 11] = [
    "e\u{323}\u{302}\u{31b}x q\u{307}\u{323}? Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤",
    "Gro\u{308}\u{df}e e\u{301}te\u{301} n\u{303} A\u{30a}\u{327}",
    "か\u{3099}き\u{3099} ハ\u{309a}ヒ\u{309a}",
    "\u{1112}\u{1161}\u{11ab}\u{1100}\u{1173}\u{11af} \u{ac00}\u{11a8}",
    "\u{212b} \u{2126} \u{212a} \u{1f71} \u{340}\u{341}\u{344}",
    "\u{958}\u{95f} \u{9dc} \u{fb2c} \u{2adc} \u{f900}\u{2f800}",
    "q\u{323}\u{307} q\u{307}\u{323} \u{301}\u{327}\u{315}x",
    "T\u{302}i\u{323}\u{302} \u{1ea1}\u{302}",
    "\u{1d15e}\u{1d160}\u{11099}\u{110ba}",
    "<|im_end|>\u{338} >\u{338} =\u{338}",
    "\u{11935}\u{11930} \u{1e08f}\u{10efd}\u{323} \u{16d63}\u{16d67}",
];

/// Code points that text is made of, so that noise hits classes, cases and compositions.
fn noise(random: &mut Random) -> char {
    const TRICKY: &str = "''  \n\r\t aAsSlLrReEvVtTdDmMſ09²½é\u{301}\u{323}\u{308}\u{338}\u{200d}\u{fe0f}.!<|>_-/\\ \u{a0}\u{3000}\u{2028}ßΣσςकि்あ漢가\u{1161}\u{11a8}👩🇩\u{1f3fd}";
    let from = |random: &mut Random, start: usize, len: usize| char::from_u32((start + random.below(len)) as u32);
    let c = match random.below(8) {
        0..=3 => TRICKY.chars().nth(random.below(TRICKY.chars().count())),
        4 => from(random, 0, 0x250),
        5 => from(random, 0x250, 0x1000),
        6 => from(random, 0, 0x10000),
        _ => from(random, 0x10000, 0x10_0000),
    };
    c.unwrap_or('\u{d7ff}')
}

fn noisy(random: &mut Random, chars: usize) -> String {
    (0..chars).map(|_| noise(random)).collect()
}

/// About `bytes` of text: sentences, words of the vocabulary, added tokens, runs of spaces.
fn text(random: &mut Random, t: &Texts, tokens: &Tokenizer, bytes: usize, decomposed: bool) -> String {
    let (added, mut out) = (t.added(), String::new());
    while out.len() < bytes {
        match random.below(32) {
            0..=1 => out += random.pick(&added),
            2 => (0..random.below(200)).for_each(|_| out.push(' ')),
            3 => (0..random.below(12)).for_each(|_| out += random.pick(&[" ", "\n", "\t", "\r\n", "\u{a0}"])),
            4 if decomposed => out += random.pick(&DECOMPOSED),
            5 if decomposed => out += &noisy(random, 10),
            4..=8 => {
                let id = random.below(tokens.vocab_len()) as u32;
                out.extend(std::str::from_utf8(tokens.token_bytes(id, false)).ok().filter(|_| decomposed));
            }
            _ => {
                let sentence = random.pick(&NORMAL);
                // Whole ones, or some of their characters.
                let skip = if random.below(2) == 0 { 0 } else { random.below(sentence.chars().count()) };
                let cut: String = sentence.chars().skip(skip).collect();
                // A mark at the start could compose with what stands before it.
                out += if skip > 0 && !decomposed { sentence } else { &cut };
            }
        }
        if random.below(3) == 0 {
            out.push(' ');
        }
    }
    out
}

fn check(tokens: &Tokenizer, oracle: &Oracle, text: &str, what: &str) -> Vec<u32> {
    let ids = tokens.encode(text).expect("ids");
    let expected = oracle.encode_fast(text, false).expect("ids");
    assert_eq!(ids, expected.get_ids(), "{what}: {text:?}");
    ids
}

/// Both forms of `t` against `oracle`.
fn equals_the_oracle(name: &str, t: &Texts, oracle: &Oracle) {
    for (form, header) in [("plain", t.plain()), ("packed", t.packed())] {
        let tokens = tokenizer(&header);
        let mut random = Random(0xF0);
        let (mut bytes, mut count) = (0, 0);
        while bytes < CORPUS_BYTES {
            let decomposed = random.below(2) == 0;
            let len = 1 + random.below(4096);
            let text = text(&mut random, t, &tokens, len, decomposed);
            let what = format!("{name}, {form}, after {bytes} bytes");
            let ids = check(&tokens, oracle, &text, &what);
            let decoded = tokens.decode(&ids, false);
            if !decomposed {
                assert_eq!(decoded, text, "{what}");
            }
            let mut stream = Stream::new(false);
            let mut streamed: String = ids.iter().map(|&id| stream.push(&tokens, id).to_owned()).collect();
            streamed += stream.finish();
            assert_eq!(streamed, decoded, "{what}");
            assert_eq!(decoded, oracle.decode(&ids, false).expect("text"), "{what}");
            (bytes, count) = (bytes + text.len(), count + ids.len());
        }
        for round in 0..20_000 {
            let chars = 1 + random.below(24);
            check(&tokens, oracle, &noisy(&mut random, chars), &format!("{name}, {form}, noise {round}"));
        }
        // Tokens in any order, of which some are no text by themselves.
        for round in 0..500 {
            let ids: Vec<u32> = (0..40).map(|_| random.below(tokens.vocab_len()) as u32).collect();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokens.token_bytes(id, false).to_vec()).collect();
            let decoded = tokens.decode(&ids, false);
            assert_eq!(decoded, String::from_utf8_lossy(&bytes), "{name}, {form}, tokens {round}");
            check(&tokens, oracle, &decoded, &format!("{name}, {form}, tokens {round}"));
        }
        println!("{name}, {form}: {bytes} bytes are the same {count} tokens");
    }
}

fn bundled(name: &str) {
    let oracle = Oracle::from_file(path(format!("checkpoints/{name}/tokenizer.json"))).expect("tokenizer.json");
    equals_the_oracle(name, &Texts::checkpoint(name), &oracle);
}

#[test]
fn the_mixtures_tokens_are_those_of_the_oracle() {
    bundled("tiny-moe");
}

#[test]
fn the_dense_models_tokens_are_those_of_the_oracle() {
    bundled("tiny-dense");
}

#[test]
fn a_large_vocabularys_tokens_are_those_of_the_oracle() {
    let t = Texts::large();
    let oracle = Oracle::from_bytes(serde_json::to_vec(&t.json()).expect("JSON")).expect("a tokenizer");
    equals_the_oracle("248k", &t, &oracle);
}
